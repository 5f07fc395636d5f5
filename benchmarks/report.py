"""Results as tables: contenders against every baseline, memory per rank, and the targets."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from benchmarks.contenders import BASELINES
from benchmarks.profiles import PROFILES
from benchmarks.stats import Summary, paired, summarize
from benchmarks.targets import outcomes

TITLES = {
    "update": "update step (reduce, then v -= lr * g)",
    "adam": "update step with Keras Adam",
    "overhead": "update step of a small model beside its bare collectives",
    "broadcast": "first broadcast of new processes",
    "rebroadcast": "later broadcasts of fresh variables in the same processes",
}
PART_BASELINES = {
    "update": tuple(contender.name for contender in BASELINES),
    "adam": ("adam/horovod",),
    "overhead": ("by_hand",),
    "broadcast": ("hvd.broadcast_variables",),
    "rebroadcast": ("hvd.broadcast_variables",),
}


def render(results: dict[str, Any]) -> str:
    """All tables of a run as text."""
    parts = [_series_table(one) for one in results["series"] if one["seconds"]]
    if results["memory"]:
        parts.append(_memory_table(results["memory"]))
    parts.append(_target_table(results))
    failed = [f"{name} ({one['ranks']} ranks, {one['profile']}): {reason}" for one, name, reason in failures(results)]
    return "\n\n".join([*parts, *(f"FAILED {line}" for line in failed)])


def failures(results: dict[str, Any]) -> list[tuple[dict[str, Any], str, str]]:
    """Series, contender and reason of everything that could not be measured."""
    return [(one, name, reason) for one in results["series"] for name, reason in one["failed"].items()]


def _spread(summary: Summary, digits: int = 2) -> str:
    return f"{summary.median:.{digits}f} [{summary.low:.{digits}f}, {summary.high:.{digits}f}]"


def _series_table(one: dict[str, Any]) -> str:
    seconds = one["seconds"]
    baselines = [name for name in PART_BASELINES[one["part"]] if name in seconds]
    rows = []
    for name, times in seconds.items():
        own = summarize(1e3 * value for value in times)
        ratios = ["" if name == other else _spread(paired(times, seconds[other])) for other in baselines]
        rows.append([name, f"{own.median:.2f}", f"{own.minimum:.2f}", *ratios])
    rounds = max((len(times) for times in seconds.values()), default=0)
    title = f"{TITLES[one['part']]}: {PROFILES[one['profile']].title}, {one['ranks']} ranks, {rounds} rounds"
    headers = ["", "ms", "min", *(f"/ {name}" for name in baselines)]
    note = "ms: median and minimum per step; /: median of paired ratios [quartiles]"
    return f"{title}\n{tabulate(rows, headers, disable_numparse=True)}\n{note}"


def _memory_table(memory: list[dict[str, Any]]) -> str:
    keys = ("optimizer_bytes", "rss_grown", "peak_rss")
    rows = [[one["ranks"], one["contender"], *(_megabytes(one[key]) for key in keys)] for one in memory]
    headers = ["ranks", "", "optimizer", "grown by training", "peak RSS"]
    return f"memory, MB of every rank: ResNet-50, Keras Adam\n{tabulate(rows, headers, disable_numparse=True)}"


def _megabytes(values: list[int]) -> str:
    return " ".join(f"{value / 1e6:.0f}" for value in values)


def _target_table(results: dict[str, Any]) -> str:
    rows = [
        [
            one.work,
            one.against,
            one.ranks,
            f"{one.median:.2f}{one.unit} [{one.low:.2f}, {one.high:.2f}]",
            f"<= {one.limit:.2f}{one.unit}",
            "yes" if one.met else "no",
        ]
        for one in outcomes(results["series"], results["memory"])
    ]
    if not rows:
        return "targets: this run measured none of them"
    headers = ["work", "against", "ranks", "measured [quartiles]", "target", "met"]
    return f"targets\n{tabulate(rows, headers, disable_numparse=True)}"
