"""Runs on every rank: all cases of this launch, one after the other; writes `rank<r>.jsonl` into a folder.

    runner.py FOLDER HOW SIZE

`FOLDER/cases.txt` names the cases. A line is written when a case begins and when it ends. A case that takes too long
has the stacks of all threads printed, and ends the job.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import cases


def main(folder: Path, how: str, size: int) -> None:
    wanted = set((folder / "cases.txt").read_text().split("\n"))
    chosen = [one for one in cases.load() if one.name in wanted and one.belongs_to(how, size)]
    world = cases.World(how=how)
    early = [attempt(one, world) for one in chosen if one.before_init]
    import hvdvars as hv

    watch(120)
    hv.init()
    from hvdvars import collectives, meeting

    world.rank, world.size, world.collectives, world.meeting = hv.rank(), hv.size(), collectives, meeting
    if world.size != size:
        raise RuntimeError(f"the launch was to have {size} ranks, and has {world.size}")
    with (folder / f"rank{world.rank}.jsonl").open("w", buffering=1) as results:
        for result in early:
            results.write(json.dumps(result) + "\n")
        for number, one in enumerate(one for one in chosen if not one.before_init):
            results.write(json.dumps({"begins": one.name}) + "\n")
            result = attempt(one, world)
            results.write(json.dumps(result) + "\n")
            agree(world, one, result, number)
        watch(60)
        results.write(json.dumps({"done": True}) + "\n")


def attempt(one: cases.Case, world: cases.World) -> dict[str, Any]:
    """Run one case under the watchdog."""
    started, used = time.perf_counter(), time.process_time()
    watch(one.limit)
    error = None
    try:
        one.function(world, *one.arguments)
    except Exception:
        error = traceback.format_exc()
    seconds, used = time.perf_counter() - started, time.process_time() - used
    if world.rank <= 0:
        verdict = "ok    " if error is None else "FAILED"
        print(f"{seconds:7.2f} s ({used:.2f} s of CPU)  {verdict}  {one.name}", flush=True)
    return {"name": one.name, "seconds": round(seconds, 3), "error": error}


def watch(limit: int) -> None:
    """Print all stacks after `limit` seconds and end the process soon after, unless called again before.

    Without a handler the alarm ends the process also where Python itself cannot run any more.
    """
    faulthandler.dump_traceback_later(limit)
    signal.alarm(limit + 5)


def agree(world: cases.World, one: cases.Case, result: dict[str, Any], number: int) -> None:
    """Meet all ranks after a case; where it failed, bring what counts along with the ranks in line again."""
    watch(one.limit)
    mine = [one.name, result["error"] is None]
    ranks = world.meeting.gather_objects(mine, "tests.agree")
    if any(name != one.name for name, _ in ranks):
        raise RuntimeError(f"the ranks ran different cases: {ranks}")
    if not all(passed for _, passed in ranks):
        from hvdvars import manager

        manager._numbers = itertools.count(1000 * (number + 1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
