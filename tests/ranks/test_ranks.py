"""Every case of `cases/` on real ranks: one launch for each world size and launcher runs all cases that belong to it.

A launch starts when the first test asks for it, and runs the cases that were selected, so that `-k "mpi-2 and reduce"`
is quick. A case that hangs ends its launch; the cases after it fail with its name.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import launchers
import pytest
from launchers import Ended, Launch

LAUNCHES = [
    *(Launch("mpi", size) for size in (1, 2, 3, 4)),
    *(Launch("gloo", size) for size in (1, 2, 3, 4)),
    Launch("horovodrun", 2),
    Launch("bare", 1),
    *(Launch(layout, sum(map(int, layout.split("+")))) for layout in cases.LAYOUTS),
]
LIMIT = 900
"""Seconds for one launch; a case that hangs is found long before, by the rank itself."""

TESTS = [(launch, one.name) for launch in LAUNCHES for one in cases.load() if one.belongs_to(launch.how, launch.size)]


@dataclass
class Results:
    """What the ranks of one launch wrote: for each rank, its lines."""

    ended: Ended
    ranks: list[list[dict[str, Any]]]

    def problems(self, name: str) -> list[str]:
        """What went wrong with one case, rank by rank."""
        found = []
        for rank, lines in enumerate(self.ranks):
            result = next((line for line in lines if line.get("name") == name), None)
            if result is None:
                begun = [line["begins"] for line in lines if "begins" in line]
                found.append(f"rank {rank} has no result; it was last in {begun[-1] if begun else 'hvdvars.init'}")
            elif result["error"]:
                found.append(f"rank {rank}: {result['error']}")
        if any("has no result" in problem for problem in found):
            found.append(f"the launch ended with {self.ended.code}; it printed\n{self.ended.tail()}")
        return found


class Launches:
    """Runs each launch once, when it is first asked for."""

    def __init__(self, folder: Path, items: list[pytest.Item]) -> None:
        self.folder = folder
        self.items = items
        self.results: dict[Launch, Results] = {}

    def results_of(self, launch: Launch) -> Results:
        if launch not in self.results:
            self.results[launch] = self._run(launch)
        return self.results[launch]

    def _run(self, launch: Launch) -> Results:
        launchers.skip_without_launcher(launch)
        folder = self.folder / str(launch)
        folder.mkdir()
        (folder / "cases.txt").write_text("\n".join(self._selected(launch)))
        runner = Path(__file__).with_name("runner.py")
        program = [sys.executable, str(runner), str(folder), launch.how, str(launch.size)]
        ended = launchers.run(launch, program, folder / "output.txt", LIMIT)
        return Results(ended, [_lines(folder / f"rank{rank}.jsonl") for rank in range(launch.size)])

    def _selected(self, launch: Launch) -> list[str]:
        chosen = [item.callspec.params for item in self.items if getattr(item, "callspec", None)]
        return [params["name"] for params in chosen if params.get("launch") == launch and "name" in params]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="session")
def launches(request, tmp_path_factory):
    return Launches(tmp_path_factory.mktemp("launches"), request.session.items)


@pytest.mark.parametrize(("launch", "name"), TESTS, ids=[f"{launch}-{name}" for launch, name in TESTS])
def test_case(launches, launch, name):
    problems = launches.results_of(launch).problems(name)
    if problems:
        pytest.fail("\n".join([f"{name} on {launch}", *problems]), pytrace=False)


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_the_launch_ends_well(launches, launch):
    results = launches.results_of(launch)
    assert results.ended.code == 0, f"{launch} ended with {results.ended.code}\n{results.ended.tail()}"
    assert all(lines and lines[-1].get("done") for lines in results.ranks)
