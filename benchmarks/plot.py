"""Results as one picture: a panel for every part, profile and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.profiles import PROFILES
from benchmarks.stats import summarize

COLORS = {"hvdvars": "tab:blue", "untuned": "tab:cyan", "adam": "tab:blue", "none": "lightgray", "mpi4py": "silver"}


def save(results: dict[str, Any], path: Path) -> None:
    """Writes a PNG: medians as bars, quartiles as whiskers, milliseconds per step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = [one for one in results["series"] if one["seconds"]]
    if not series:
        return
    columns = min(2, len(series))
    rows = -(-len(series) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(8 * columns, 3.4 * rows), squeeze=False)
    for axis in axes.flat[len(series) :]:
        axis.set_axis_off()
    for axis, one in zip(axes.flat, series, strict=False):
        _panel(axis, one)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, one: dict[str, Any]) -> None:
    names = list(one["seconds"])
    found = [summarize(1e3 * value for value in one["seconds"][name]) for name in names]
    whiskers = [[own.median - own.low for own in found], [own.high - own.median for own in found]]
    colors = [COLORS.get(name.split("/")[0].split(".")[0], "tab:orange") for name in names]
    axis.barh(names, [own.median for own in found], xerr=whiskers, color=colors, ecolor="dimgray", capsize=2)
    axis.invert_yaxis()
    axis.set_xlabel("ms per step (median, quartiles)")
    axis.set_title(f"{one['part']}: {PROFILES[one['profile']].title}, {one['ranks']} ranks", fontsize=10)
    axis.tick_params(labelsize=8)
