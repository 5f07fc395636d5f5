"""Statistics of interleaved measurements. Pure, no NumPy."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Summary:
    """Median and spread of a sample, in the sample's unit."""

    median: float
    low: float
    high: float
    minimum: float
    count: int

    def as_dict(self) -> dict[str, float]:
        """The same as plain JSON values."""
        return asdict(self)


def summarize(values: Iterable[float]) -> Summary:
    """Median, quartiles (linear between neighbours), minimum and count of a sample that is not empty."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("summarize: expected at least one value, got none")
    if len(ordered) == 1:
        return Summary(ordered[0], ordered[0], ordered[0], ordered[0], 1)
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return Summary(statistics.median(ordered), low, high, ordered[0], len(ordered))


def paired(ours: Sequence[float], baseline: Sequence[float], *, difference: bool = False) -> Summary:
    """Summary of ours / baseline (or ours - baseline) taken round by round, so that slow phases of the machine cancel.

    Both hold one time per round, in the order of the rounds; ValueError if the lengths differ or a baseline is not
    positive.
    """
    if len(ours) != len(baseline):
        raise ValueError(f"paired: expected as many rounds in both samples, got {len(ours)} and {len(baseline)}")
    if difference:
        return summarize(mine - theirs for mine, theirs in zip(ours, baseline, strict=True))
    if any(value <= 0 for value in baseline):
        raise ValueError(f"paired: expected positive baseline times, got {min(baseline)}")
    return summarize(mine / theirs for mine, theirs in zip(ours, baseline, strict=True))


def best_of(samples: dict[str, Sequence[float]]) -> str:
    """The name with the smallest median: the baseline to beat when a user could have taken any of them."""
    if not samples:
        raise ValueError("best_of: expected at least one sample, got none")
    return min(samples, key=lambda name: statistics.median(samples[name]))
