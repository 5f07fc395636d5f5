"""Memory per rank: each way to train ResNet-50 with Adam in processes of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.contenders import ADAM
from benchmarks.jobs import JobError, Pool
from benchmarks.rounds import Series

PROFILE = "resnet50"


def measure(
    ranks: int, folder: Path, limit: float, environment: dict[str, str], series: list[Series]
) -> list[dict[str, Any]]:
    """Bytes of every rank, by contender; what cannot be measured is added to `series` as failed."""
    found = []
    failed = Series("memory", ranks, PROFILE)
    for contender in ADAM:
        with Pool(ranks, folder, limit, environment) as pool:
            try:
                job = pool.job(contender.job)
                answers = job.ask({"do": "prepare", "contender": contender.as_dict(), "profile": PROFILE})
            except JobError as error:
                failed.failed[contender.name] = str(error)
                continue
        found.append(
            {
                "ranks": ranks,
                "contender": contender.name,
                "optimizer_bytes": _optimizer_bytes([answer["report"] for answer in answers]),
                "rss_grown": [answer["rss"] - ready["rss"] for answer, ready in zip(answers, job.ready, strict=True)],
                "peak_rss": [answer["peak_rss"] for answer in answers],
            }
        )
    if failed.failed:
        series.append(failed)
    return found


def _optimizer_bytes(reports: list[dict[str, Any]]) -> list[int]:
    """Every rank's own figure: a plan may tell this rank's bytes, or those of all ranks in order."""
    found = []
    for rank, report in enumerate(reports):
        told = [plan["optimizer_bytes"] for plan in report["plans"]]
        found.append(sum(int(one[rank] if isinstance(one, list) else one) for one in told))
    return found
