"""Starts `worker.py`: each launch once, when the first test asks for one of its configurations, with all selected."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launchers
import pytest
from launchers import Ended, Launch

LIMIT = 1500
"""Seconds for one launch; a configuration that hangs is found long before, by the rank itself."""

BARE = Launch("bare", 1)


@dataclass(frozen=True)
class Configuration:
    """Runs that follow one another in each rank's process; see `worker.py` for what a run has."""

    name: str
    launch: Launch
    runs: tuple[dict[str, Any], ...]


@dataclass
class Results:
    """What the ranks of one launch wrote: for each rank, its lines."""

    ended: Ended
    ranks: list[list[dict[str, Any]]]

    def of(self, name: str) -> list[list[dict[str, Any]]]:
        """What the runs of a configuration did, for each rank; the test fails where one of them has failed."""
        found, problems = [], []
        for rank, lines in enumerate(self.ranks):
            result = next((line for line in lines if line.get("name") == name), None)
            if result is None:
                begun = [line["begins"] for line in lines if "begins" in line]
                problems.append(f"rank {rank} has no result; it was last in {begun[-1] if begun else 'its start'}")
            elif result["error"]:
                problems.append(f"rank {rank}: {result['error']}")
            else:
                found.append(result["runs"])
        if any("no result" in problem for problem in problems):
            problems.append(f"the launch ended with {self.ended.code}; it printed\n{self.ended.tail()}")
        if problems:
            pytest.fail("\n".join([name, *problems]), pytrace=False)
        return found


def run(launch: Launch, copy: Path, folder: Path, configurations: Sequence[Configuration]) -> Results:
    """Run the configurations on the ranks of a launch, with the checkout in `copy`."""
    folder.mkdir()
    listed = [{"name": one.name, "runs": one.runs} for one in configurations]
    (folder / "configurations.json").write_text(json.dumps(listed))
    program = [sys.executable, str(Path(__file__).with_name("worker.py")), str(copy), str(folder)]
    ended = launchers.run(launch, program, folder / "output.txt", LIMIT)
    paths = [folder / f"rank{rank}.jsonl" for rank in range(launch.size)]
    return Results(ended, [_lines(path) for path in paths])


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Launches:
    """Runs each launch once, when it is first asked for, with all the configurations that belong to it."""

    def __init__(self, folder: Path, copy: Path, configurations: Sequence[Configuration]) -> None:
        self.folder, self.copy, self.configurations = folder, copy, configurations
        self.results: dict[Launch, Results] = {}

    def of(self, wanted: Configuration) -> list[list[dict[str, Any]]]:
        """What the runs of a configuration did, for each rank; the test fails where one of them has failed."""
        launch = wanted.launch
        if launch not in self.results:
            chosen = [one for one in self.configurations if one.launch == launch]
            self.results[launch] = run(launch, self.copy, self._folder(launch), chosen)
        return self.results[launch].of(wanted.name)

    def folder_of(self, wanted: Configuration) -> Path:
        """Where the runs of a configuration have their files."""
        return self._folder(wanted.launch) / wanted.name

    def _folder(self, launch: Launch) -> Path:
        return self.folder / f"{self.copy.parent.name}-{launch}"


def selected(items: Sequence[pytest.Item], kind: type) -> list[Any]:
    """The parameters `case` of this kind, of the tests that are to run."""
    cases = [getattr(item, "callspec", None) and item.callspec.params.get("case") for item in items]
    return [case for case in cases if isinstance(case, kind)]
