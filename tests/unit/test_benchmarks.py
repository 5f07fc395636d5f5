"""The benchmark's profiles, statistics, targets and process handling; nothing here loads TensorFlow."""

from __future__ import annotations

import math
import random
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import jobs, report, rounds, stats, targets  # noqa: E402
from benchmarks.contenders import BASELINES, BROADCAST, JOBS, Contender, update_contenders  # noqa: E402
from benchmarks.jobs import JobError, Pool  # noqa: E402
from benchmarks.profiles import PROFILES  # noqa: E402


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [
        ("1000x256", 1000, 256_000),
        ("resnet50", 161, 25_557_032),
        ("vgg16", 32, 138_357_544),
        ("100MB", 1, 25_000_000),
        ("cnn", 8, 38_282),
    ],
)
def test_profile_counts(name, tensors, elements):
    profile = PROFILES[name]
    assert (len(profile.shapes), profile.elements, profile.bytes) == (tensors, elements, 4 * elements)


def test_resnet50_layers():
    shapes = PROFILES["resnet50"].shapes
    assert sum(len(shape) == 4 for shape in shapes) == 53
    assert shapes[0] == (7, 7, 3, 64)
    assert shapes[-2:] == ((2048, 1000), (1000,))


def test_summary_of_a_known_sample():
    found = stats.summarize([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.low, found.median, found.high, found.minimum, found.count) == (2.0, 3.0, 4.0, 1.0, 5)
    assert stats.summarize([7.0]) == stats.Summary(7.0, 7.0, 7.0, 7.0, 1)
    with pytest.raises(ValueError, match="at least one"):
        stats.summarize([])


def test_paired_ratio_cancels_a_slow_machine():
    noise = [random.Random(0).uniform(1, 10) for _ in range(9)]
    found = stats.paired([0.5 * slow for slow in noise], noise)
    assert math.isclose(found.low, 0.5) and math.isclose(found.median, 0.5) and math.isclose(found.high, 0.5)


def test_paired_difference_and_refusals():
    assert stats.paired([3.0, 5.0], [1.0, 1.0], difference=True).median == 3.0
    with pytest.raises(ValueError, match="2 and 1"):
        stats.paired([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="positive"):
        stats.paired([1.0], [0.0])


def test_best_of_takes_the_smallest_median():
    assert stats.best_of({"a": [1.0, 9.0, 9.0], "b": [5.0, 5.0, 5.0]}) == "b"
    with pytest.raises(ValueError, match="at least one"):
        stats.best_of({})


def _series(part="update", profile="resnet50", ranks=2, **seconds):
    return {"part": part, "profile": profile, "ranks": ranks, "seconds": seconds, "failed": {}}


def test_targets_use_the_better_baseline():
    times = {"hvdvars/horovod": [0.06, 0.06], "plain/per_tensor": [0.12, 0.12], "plain/grouped": [0.10, 0.10]}
    (found,) = targets.outcomes([_series(**times)], [])
    assert found.against == "plain/grouped"
    assert math.isclose(found.median, 0.6)
    assert found.met


def test_overhead_is_a_difference_in_milliseconds():
    one = _series("overhead", "cnn", **{"hvdvars/horovod": [0.0025], "by_hand": [0.002]})
    (found,) = targets.outcomes([one], [])
    assert math.isclose(found.median, 0.5)
    assert not found.met


def test_optimizer_memory_counts_the_fullest_rank():
    memory = [
        {"ranks": 2, "contender": "adam/horovod", "optimizer_bytes": [200, 200]},
        {"ranks": 2, "contender": "adam/parameter_server/elements", "optimizer_bytes": [101, 99]},
    ]
    (found,) = targets.outcomes([], memory)
    assert math.isclose(found.median, 0.505)
    assert found.met


def test_report_names_everything_measured():
    times = {"hvdvars/horovod": [0.06, 0.05], "plain/per_tensor": [0.12, 0.10]}
    results = {"series": [_series(**times)], "memory": []}
    text = report.render(results)
    assert "0.50 [0.50, 0.50]" in text
    assert "<= 0.75" in text
    results["series"][0]["failed"] = {"multiworker/ring": "job multiworker (2 ranks): rank 1 ended"}
    assert "FAILED multiworker/ring (2 ranks, resnet50)" in report.render(results)


def test_patterns_choose_contenders():
    assert [one.name for one in update_contenders(["plain/*"], untuned=False)] == ["plain/per_tensor", "plain/grouped"]
    assert "untuned/horovod" in [one.name for one in update_contenders([], untuned=True)]
    with pytest.raises(ValueError, match="--contenders nobody"):
        update_contenders(["nobody"], untuned=False)
    assert {one.job for one in BASELINES} <= set(JOBS)


class _FakeJob:
    def __init__(self, name, broken):
        self.name, self.broken, self.order = name, broken, []

    def ask(self, command):
        if command["do"] == "block" and self.broken:
            raise JobError(self.name, f"job {self.name} (2 ranks): rank 1 ended")
        return [{"seconds": 0.1, "report": None}, {"seconds": 0.2, "report": None}]


class _FakePool:
    def __init__(self, broken=()):
        self.ranks, self.dropped = 2, []
        self._jobs = {name: _FakeJob(name, name in broken) for name in JOBS}

    def job(self, name):
        return self._jobs[name]

    def started(self, name):
        return name not in self.dropped

    def make_room(self, wanted, keep):
        pass

    def drop(self, name):
        self.dropped.append(name)


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_rounds_keep_the_slowest_rank(share):
    settings = rounds.Settings(rounds=3, block_seconds=1.0, memory_share=share)
    ticks = []
    found = rounds.Rounds(_FakePool(), "update", "cnn", BASELINES, settings).measure(ticks.append)
    assert found.seconds == {one.name: [0.2, 0.2, 0.2] for one in BASELINES}
    assert set(found.steps.values()) == {5}
    assert len(ticks) == len(BASELINES) * 4


def test_cold_rounds_start_new_processes():
    pool = _FakePool()
    settings = rounds.Settings(rounds=3, block_seconds=0.0, single=True, cold=True)
    found = rounds.Rounds(pool, "broadcast", "cnn", BROADCAST, settings).measure(lambda what: None)
    assert found.seconds == {one.name: [0.2, 0.2, 0.2] for one in BROADCAST}
    assert sorted(pool.dropped) == ["hvdvars"] * 3 + ["plain"] * 3


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_a_failing_job_loses_its_contenders_only(share):
    pool = _FakePool(broken=["plain"])
    settings = rounds.Settings(rounds=2, block_seconds=1.0, memory_share=share)
    found = rounds.Rounds(pool, "update", "cnn", BASELINES, settings).measure(lambda what: None)
    assert set(found.failed) == {"plain/per_tensor", "plain/grouped"}
    assert set(found.seconds) == {"none", "mpi4py", "mpi4py/tuned", "multiworker/ring"}
    assert pool.dropped == ["plain"]


def test_job_sleeps_answers_and_ends(tmp_path):
    with Pool(2, tmp_path, 60, {}) as pool:
        job = pool.job("none")
        processes = [psutil.Process(one.pid) for one in job._launched]
        assert len(job.ready) == 2
        assert _states(processes) == {psutil.STATUS_STOPPED}
        assert [set(answer) for answer in job.ask({"do": "free"})] == [{"rss", "peak_rss"}] * 2
        assert _states(processes) == {psutil.STATUS_STOPPED}
    assert not any(process.is_running() for process in processes)


def test_pool_ends_sleeping_jobs_for_memory(tmp_path, monkeypatch):
    with Pool(1, tmp_path, 60, {}) as pool:
        pool.job("none")
        pool.make_room(0, keep="plain")
        assert pool.started("none")
        monkeypatch.setattr(jobs, "available_memory", lambda: 10)
        pool.make_room(11, keep="none")
        assert pool.started("none")
        pool.make_room(11, keep="plain")
        assert not pool.started("none")


def test_job_reports_an_error_and_a_killed_rank(tmp_path):
    unknown = Contender("unknown", "none", "unknown").as_dict()
    with Pool(2, tmp_path, 60, {}) as pool:
        with pytest.raises(JobError, match=r"job none \(2 ranks\): rank [01]: KeyError"):
            pool.job("none").ask({"do": "prepare", "contender": unknown, "profile": "nothing"})
        pool.drop("none")
        job = pool.job("none")
        psutil.Process(job._launched[1].pid).send_signal(signal.SIGKILL)
        with pytest.raises(JobError, match="rank 1 ended|a rank is gone"):
            job.ask({"do": "free"})


def _states(processes):
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        found = {process.status() for process in processes}
        if found == {psutil.STATUS_STOPPED}:
            break
        time.sleep(0.01)
    return found
