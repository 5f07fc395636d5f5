"""One rank of one job: prepares contenders, runs blocks of steps and answers with times, on command."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.contenders import Contender

CHECKED_STEPS = 2


class Session:
    """What a rank keeps between commands: its world, the data of each profile and the prepared steps."""

    def __init__(self, job: str) -> None:
        from benchmarks import worlds

        self.world = worlds.join(job)
        self.data: dict[Any, Any] = {}
        self.prepared: dict[str, Any] = {}

    def prepare(self, contender: dict[str, Any], profile: str) -> dict[str, Any]:
        """Builds a contender's step on a profile, checks that it computes what it should, and times one step."""
        from benchmarks import steps
        from benchmarks.profiles import PROFILES

        spec = Contender(**contender)
        prepared = steps.build(self.world, spec, PROFILES[profile], self.data)
        self.prepared[spec.name] = prepared
        for _ in range(CHECKED_STEPS):
            prepared.check(prepared.step)
        return {"seconds": _timed(prepared.step), "report": prepared.report(), **memory()}

    def block(self, contender: str, warmup: int, steps: int) -> dict[str, Any]:
        """Seconds per step over a block of steps, after some that are not counted."""
        prepared = self.prepared[contender]
        prepared.align()
        for _ in range(warmup):
            prepared.step()
        start = time.perf_counter()
        own = [prepared.step() for _ in range(steps)]
        elapsed = time.perf_counter() - start
        # A step that times a part of itself (cold calls on fresh objects) says so by returning seconds.
        inner = [seconds for seconds in own if seconds is not None]
        return {"seconds": sum(inner) / len(inner) if inner else elapsed / steps}

    def free(self) -> dict[str, Any]:
        """Forgets all steps and data and gives the memory back to the system."""
        self.prepared.clear()
        self.data.clear()
        return self.settle()

    def settle(self) -> dict[str, Any]:
        """Memory once garbage is collected and what the allocator holds back is returned to the system."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return memory()


def memory() -> dict[str, int]:
    """Bytes of this process in memory, now and at most so far."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"rss": pages * resource.getpagesize(), "peak_rss": peak}


def _timed(step: Callable[[], float | None]) -> float:
    start = time.perf_counter()
    own = step()
    return time.perf_counter() - start if own is None else own


def serve(channel: socket.socket, job: str) -> None:
    """Answers commands until told to exit or the orchestrator is gone."""
    lines = channel.makefile("r", encoding="utf-8")
    if lines.readline() != "start\n":
        return

    def answer(content: dict[str, Any]) -> None:
        channel.sendall(json.dumps(content).encode() + b"\n")

    try:
        session = Session(job)
        answer({"ready": True, **memory()})
        for line in lines:
            command = json.loads(line)
            action = command.pop("do")
            if action == "exit":
                return
            answer(getattr(session, action)(**command))
    except Exception as error:  # the orchestrator prints it; this rank cannot go on in step with the others
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--limit", type=int, required=True, help="seconds after which this process ends by itself")
    arguments = parser.parse_args()
    signal.alarm(arguments.limit)
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["BENCHMARK_RANK"]
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(arguments.socket)
        channel.sendall(json.dumps({"rank": int(rank), "pid": os.getpid()}).encode() + b"\n")
        serve(channel, arguments.job)
    # Not the interpreter's way out: MPI and Horovod would wait there for ranks that may be gone.
    os._exit(0)


if __name__ == "__main__":
    main()
