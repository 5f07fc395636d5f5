"""What is to be reached, and how it is read from the results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.contenders import PLAIN
from benchmarks.stats import best_of, paired


@dataclass(frozen=True)
class Target:
    """At most `limit` times the baseline (the better of several), by number of ranks; `difference`: ms above it."""

    part: str
    profile: str
    contender: str
    baselines: tuple[str, ...]
    limit: dict[int, float]
    difference: bool = False


MULTIWORKER = ("multiworker/ring",)
TARGETS = (
    Target("update", "1000x256", "hvdvars/horovod", ("plain/per_tensor",), {2: 0.45}),
    Target("update", "1000x256", "hvdvars/horovod", MULTIWORKER, {2: 0.55}),
    Target("update", "resnet50", "hvdvars/horovod", PLAIN, {2: 0.75, 4: 0.75}),
    Target("update", "resnet50", "hvdvars/horovod", MULTIWORKER, {2: 0.25, 4: 0.25}),
    Target("update", "100MB", "hvdvars/horovod", PLAIN, {2: 0.75, 4: 0.75}),
    Target("update", "100MB", "untuned/horovod", PLAIN, {2: 0.95, 4: 0.80}),
    Target("adam", "resnet50", "adam/parameter_server", ("adam/horovod",), {2: 1.10, 4: 1.00}),
    Target("adam", "resnet50", "adam/parameter_server/elements", ("adam/horovod",), {2: 1.10, 4: 1.00}),
    Target("broadcast", "1000x256", "hvdvars.broadcast", ("hvd.broadcast_variables",), {2: 0.35, 4: 0.35}),
    Target("overhead", "cnn", "hvdvars/horovod", ("by_hand",), {2: 0.3}, difference=True),
)
MEMORY_SLACK = 0.05


@dataclass(frozen=True)
class Outcome:
    """One target beside what was measured: ratios, or milliseconds where `difference`."""

    work: str
    against: str
    ranks: int
    limit: float
    median: float
    low: float
    high: float
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether the median reaches the target."""
        return self.median <= self.limit


def outcomes(series: list[dict[str, Any]], memory: list[dict[str, Any]]) -> Iterator[Outcome]:
    """Every target for which this run holds the numbers, in the order of the table above."""
    for target in TARGETS:
        for one in series:
            limit = target.limit.get(one["ranks"])
            if (one["part"], one["profile"]) == (target.part, target.profile) and limit is not None:
                yield from _outcome(target, one, limit)
    yield from _memory_outcomes(memory)


def _outcome(target: Target, one: dict[str, Any], limit: float) -> Iterator[Outcome]:
    seconds = one["seconds"]
    available = {name: seconds[name] for name in target.baselines if name in seconds}
    if target.contender not in seconds or not available:
        return
    baseline = best_of(available)
    found = paired(seconds[target.contender], seconds[baseline], difference=target.difference)
    scale, unit = (1e3, " ms") if target.difference else (1.0, "")
    work = f"{target.profile}: {target.contender}"
    spread = (found.median * scale, found.low * scale, found.high * scale)
    yield Outcome(work, baseline, one["ranks"], limit, *spread, unit)


def _memory_outcomes(memory: list[dict[str, Any]]) -> Iterator[Outcome]:
    """Optimizer bytes on the rank that holds most, against those of the mode that keeps them everywhere."""
    whole = {one["ranks"]: max(one["optimizer_bytes"]) for one in memory if one["contender"] == "adam/horovod"}
    for one in memory:
        if one["contender"].endswith("/elements") and whole.get(one["ranks"]):
            share = max(one["optimizer_bytes"]) / whole[one["ranks"]]
            limit = (1 + MEMORY_SLACK) / one["ranks"]
            work = f"optimizer bytes: {one['contender']}"
            yield Outcome(work, "adam/horovod", one["ranks"], limit, share, share, share)
