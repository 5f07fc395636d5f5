"""Memory per rank: each way to train ResNet-50 with Adam in processes of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contenders import ADAM
from benchmarks.jobs import JobError, Pool
from benchmarks.rounds import Series

PROFILE = "resnet50"


def measure(
    ranks: int, folder: Path, limit: float, environment: dict[str, str], tick: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Bytes of every rank, by contender; and, where some could not be measured, a series that says why."""
    found = []
    failed = Series("memory", ranks, PROFILE)
    for contender in ADAM:
        tick(f"{contender.name}: memory")
        with Pool(ranks, folder, limit, environment) as pool:
            try:
                job = pool.job(contender.job)
                before = job.ask({"do": "settle"})
                prepared = job.ask({"do": "prepare", "contender": contender.as_dict(), "profile": PROFILE})
                after = job.ask({"do": "settle"})
            except JobError as error:
                failed.failed[contender.name] = str(error)
                continue
        found.append(
            {
                "ranks": ranks,
                "contender": contender.name,
                "optimizer_bytes": _optimizer_bytes([answer["report"] for answer in prepared]),
                "rss_grown": [new["rss"] - old["rss"] for new, old in zip(after, before, strict=True)],
                "peak_rss": [answer["peak_rss"] for answer in after],
            }
        )
    return found, [failed.as_dict()] if failed.failed else []


def _optimizer_bytes(reports: list[dict[str, Any]]) -> list[int]:
    """Every rank's own figure: a plan may tell this rank's bytes, or those of all ranks in order."""
    found = []
    for rank, report in enumerate(reports):
        told = [plan["optimizer_bytes"] for plan in report["plans"]]
        found.append(sum(int(one[rank] if isinstance(one, list) else one) for one in told))
    return found
