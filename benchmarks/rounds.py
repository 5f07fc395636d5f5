"""Interleaved rounds: every round runs each contender for one short block, in a new random order."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.contenders import Contender
from benchmarks.jobs import Job, JobError, Pool, available_memory
from benchmarks.profiles import PROFILES

# TensorFlow learns over about a hundred runs of an operation whether it is worth a thread of its own; until then a step
# of a thousand small operations takes up to twice the time. Within SETTLE_SECONDS, every contender is past that.
SETTLE_STEPS = 150
SETTLE_SECONDS = 4.0
# Bytes of a rank in bytes of the profile: asleep with its data, and at most while it steps.
ASLEEP_COPIES = 3
AWAKE_COPIES = 8


@dataclass(frozen=True)
class Settings:
    """How long to measure: seconds are per block of one contender.

    `single`: a block is one step without warm-up. `cold`: it is the first step of new processes.
    """

    rounds: int
    block_seconds: float
    single: bool = False
    cold: bool = False
    seed: int = 0
    memory_share: float = 0.6


@dataclass
class Series:
    """What one part measured on one profile and number of ranks: by contender, seconds per step of every round."""

    part: str
    ranks: int
    profile: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    reports: dict[str, list[Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self)


class Rounds:
    """Measures one Series."""

    def __init__(self, pool: Pool, part: str, profile: str, contenders: Iterable[Contender], settings: Settings):
        self.series = Series(part, pool.ranks, profile)
        self._pool = pool
        self._contenders = list(contenders)
        self._settings = settings
        self._order = random.Random(settings.seed)
        # Where only one job's data fits in memory: that job, and which of its contenders are built.
        self._holder = ""
        self._built: set[str] = set()
        self._kept = _fits(PROFILES[profile].bytes, pool.ranks, self._contenders, settings.memory_share)

    def measure(self, tick: Callable[[str], None]) -> Series:
        """Prepares every contender, runs all rounds, frees what was made; a failing job loses its contenders only."""
        for contender in self._contenders if not self._settings.cold else []:
            tick(f"{contender.name}: prepare")
            self._attempt(contender, self._prepare)
        for number in range(self._settings.rounds):
            for contender in self._shuffled():
                tick(f"{contender.name}: round {number + 1}")
                self._attempt(contender, self._cold if self._settings.cold else self._block)
        for name in self._alive_jobs():
            try:
                self._free(self._pool.job(name))
            except JobError:
                self._pool.drop(name)
        names = [contender.name for contender in self._contenders if contender.name not in self.series.failed]
        self.series.seconds = {name: self.series.seconds[name] for name in names}
        return self.series

    def _shuffled(self) -> list[Contender]:
        """All contenders in random order; when only one job's data fits in memory, job after job."""
        order = self._order.sample(self._contenders, len(self._contenders))
        if not self._kept:
            jobs = list(dict.fromkeys(contender.job for contender in order))
            order.sort(key=lambda contender: jobs.index(contender.job))
        return order

    def _attempt(self, contender: Contender, action: Callable[[Contender], object]) -> None:
        """Runs the action; a job that fails is ended and loses its contenders, and the others try again."""
        while contender.name not in self.series.failed:
            try:
                action(contender)
                return
            except JobError as error:
                self._pool.drop(error.job)
                if error.job == contender.job:
                    self.series.failed[contender.name] = str(error)
                for other in self._contenders:
                    if other.job == error.job:
                        reason = f"its job {error.job} ended while {contender.name} ran"
                        self.series.failed.setdefault(other.name, reason)

    def _prepare(self, contender: Contender) -> float:
        """Builds and checks the step; seconds that one step took."""
        answers = self._build(contender)
        self.series.reports[contender.name] = [answer["report"] for answer in answers]
        seconds = max(answer["seconds"] for answer in answers)
        if self._settings.single:
            self.series.steps[contender.name] = 1
            return seconds
        if self._kept:
            seconds = self._ask_block(contender, min(SETTLE_STEPS, math.ceil(SETTLE_SECONDS / seconds)), 1)
        else:
            self._free(self._pool.job(contender.job))
        self.series.steps[contender.name] = min(500, max(2, math.ceil(self._settings.block_seconds / seconds)))
        return seconds

    def _build(self, contender: Contender) -> list[dict[str, Any]]:
        if not self._kept:
            wanted = AWAKE_COPIES * PROFILES[self.series.profile].bytes * self._pool.ranks
            self._pool.make_room(wanted, keep=contender.job)
        command = {"do": "prepare", "contender": contender.as_dict(), "profile": self.series.profile}
        return self._pool.job(contender.job).ask(command)

    def _block(self, contender: Contender) -> None:
        if not self._kept:
            self._make_room(contender)
        steps = self.series.steps[contender.name]
        seconds = self._ask_block(contender, 0 if self._settings.single else min(3, steps), steps)
        self.series.seconds.setdefault(contender.name, []).append(seconds)

    def _ask_block(self, contender: Contender, warmup: int, steps: int) -> float:
        command = {"do": "block", "contender": contender.name, "warmup": warmup, "steps": steps}
        return max(answer["seconds"] for answer in self._pool.job(contender.job).ask(command))

    def _cold(self, contender: Contender) -> None:
        self._pool.drop(contender.job)
        self.series.seconds.setdefault(contender.name, []).append(self._prepare(contender))

    def _make_room(self, contender: Contender) -> None:
        """Frees what another job holds and builds this contender's data anew, outside the timed block."""
        if self._holder != contender.job:
            holder, self._holder, self._built = self._holder, contender.job, set()
            if holder and self._pool.started(holder):
                self._free(self._pool.job(holder))
        if contender.name not in self._built:
            self._build(contender)
            self._built.add(contender.name)

    def _alive_jobs(self) -> list[str]:
        return [name for name in dict.fromkeys(one.job for one in self._contenders) if self._pool.started(name)]

    def _free(self, job: Job) -> None:
        job.ask({"do": "free"})


def _fits(profile_bytes: int, ranks: int, contenders: list[Contender], share: float) -> bool:
    """Whether every job may keep the profile's data in memory while it sleeps."""
    jobs = len({contender.job for contender in contenders})
    return (ASLEEP_COPIES * jobs + AWAKE_COPIES) * profile_bytes * ranks < share * available_memory()
