"""What rank 0 shows: the start table, a progress bar or one line per epoch, and the result."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from tabulate import tabulate  # type: ignore[import-untyped]
from tqdm import tqdm

_OWNERS_SHOWN = 8


@dataclass(frozen=True)
class EpochResult:
    """Training loss (mean per sample) and accuracy (0 to 1) of an epoch, and images per second, all ranks together."""

    epoch: int
    loss: float
    accuracy: float
    images_per_second: float
    seconds: float


class Screen:
    """Writes to ``stream`` where ``on``: that is on rank 0, unless ``--quiet``. Local."""

    def __init__(self, on: bool, stream: TextIO) -> None:
        self._on = on
        self._stream = stream
        # Launchers make standard output a terminal on some ranks, but pass standard error on through a pipe.
        self._bar = on and sys.stderr.isatty()

    def start(self, rows: dict[str, str]) -> None:
        """Print the table of what runs."""
        if self._on:
            print(tabulate(list(rows.items()), tablefmt="plain", disable_numparse=True), file=self._stream, flush=True)

    @contextlib.contextmanager
    def progress(self, epoch: int, epochs: int, images: int) -> Iterator[Callable[[int], None]]:
        """Give a function that counts ``images`` as they are trained on; a bar where standard error is a terminal."""
        bar: Any = None

        def advance(count: int) -> None:
            nonlocal bar
            if not self._bar:
                return
            if bar is None:  # Not before the first step is done, whose table would tear the bar.
                bar = tqdm(
                    total=images,
                    desc=f"epoch {epoch}/{epochs}",
                    unit=" images",
                    leave=False,
                    file=sys.stderr,
                    dynamic_ncols=True,
                )
            bar.update(count)

        try:
            yield advance
        finally:
            if bar is not None:
                bar.close()

    def epoch(self, result: EpochResult, epochs: int) -> None:
        """Print the line of an epoch that is over."""
        if self._on:
            print(
                f"epoch {result.epoch:>{len(str(epochs))}}/{epochs}  loss {result.loss:.4f}  "
                f"accuracy {result.accuracy:.4f}  {result.images_per_second:,.0f} images/s",
                file=self._stream,
                flush=True,
            )


def report_rows(report: dict[str, Any]) -> dict[str, str]:
    """The rows of the start table that ``mgr.report()`` knows: ranks, mode, transport, collectives, owners, options."""
    world, plans = report["world"], report["plans"]
    size, nodes = world["size"], world["nodes"]
    rows = {
        "ranks": f"{size} on {nodes} node{'s' if nodes != 1 else ''}",
        "mode": f"{report['mode']} ({report['class']})",
        "transport": str(world["transport"]),
    }
    collectives = sum(plan["collectives_per_step"] for plan in plans)
    moved = sum(plan["bytes_per_step"] for plan in plans)
    rows["collectives"] = f"{collectives} per step, {megabytes(moved)}" if collectives else "none"
    owners = [sum(parts) for parts in zip(*(plan["owners"] for plan in plans if plan.get("owners")), strict=False)]
    if owners:
        everywhere = owners == [sum(plan["bytes"] for plan in plans)] * size
        rows["owners"] = f"every rank, {megabytes(owners[0])}" if everywhere else _balance(owners)
    return rows


def _balance(owners: list[int]) -> str:
    worst = max(owners) * len(owners) / sum(owners) if sum(owners) else 1.0
    parts = [f"rank {rank} {megabytes(size)}" for rank, size in enumerate(owners)]
    if len(owners) > _OWNERS_SHOWN:
        parts = [f"{megabytes(min(owners))} to {megabytes(max(owners))} on {len(owners)} ranks"]
    return f"{', '.join(parts)} (largest/mean {worst:.2f})"


def megabytes(count: float) -> str:
    """Bytes in MB (10⁶)."""
    return f"{count / 1e6:.3g} MB" if count < 1e8 else f"{count / 1e6:,.0f} MB"


def result_lines(summary: dict[str, Any]) -> list[str]:
    """The last lines of a run; scripts look for them, so that their wording stays."""
    lines = [f"test accuracy: {summary['test_accuracy']:.3f}"]
    if summary["diverged"]:
        lines.insert(0, f"diverged: the loss is no number after epoch {summary['epoch']}; lower --learning_rate")
    identical = summary["replicas_identical"]
    if identical is None:
        return [*lines, "replicas identical: not expected (independent)"]
    lines.append(f"replicas identical: {'yes' if identical else 'no'}")
    return lines if identical else [*lines, summary["replicas_differ"]]


def as_json(values: dict[str, Any]) -> str:
    """The values as one line of JSON, in which NaN and infinity (of a run that diverged) are null."""
    return json.dumps(_finite(values), allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
