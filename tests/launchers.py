"""Start a program on several ranks the way users do: mpirun, horovodrun with MPI or with Gloo, or no launcher.

Or on nodes that this machine only plays.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent

# What another launcher may have left in our own environment would be taken for a world by the ranks.
_FOREIGN = re.compile(r"(OMPI|PMIX?|HYDRA?|HOROVOD|SLURM|MPI)_|OPAL_PREFIX|TF_CONFIG")


@dataclass(frozen=True)
class Launch:
    """`how` is `mpi` (mpirun), `gloo` (horovodrun --gloo), `horovodrun` (with MPI), `bare`, or nodes such as `3+2`."""

    how: str
    size: int

    def __str__(self) -> str:
        return f"{self.how}-{self.size}"


@dataclass(frozen=True)
class Ended:
    """A launch that is over: `code` is None where it had to be ended after its time."""

    code: int | None
    output: str
    seconds: float
    at: float
    """When it was over, in `time.time()`."""

    def tail(self, lines: int = 80) -> str:
        return "\n".join(self.output.splitlines()[-lines:])


def find(program: str) -> str:
    """The program of this Python's environment, or else the site's. Raises FileNotFoundError."""
    own = BIN / program
    found = str(own) if own.exists() else shutil.which(program)
    if found is None:
        raise FileNotFoundError(f"{program} is neither in {BIN} nor on PATH: set up the environment with `make setup`")
    return found


@functools.cache
def mpi_version() -> tuple[str, int]:
    """`("Open MPI", 4)`, `("MPICH", 4)` or `("unknown", 0)`."""
    text = subprocess.run([find("mpirun"), "--version"], capture_output=True, text=True, env=environment()).stdout
    for name, pattern in (("Open MPI", r"Open MPI\D*(\d+)\."), ("MPICH", r"HYDRA.*?Version:\s*(\d+)\.")):
        match = re.search(pattern, text, re.DOTALL)
        if match:
            return name, int(match[1])
    return "unknown", 0


def skip_without_launcher(launch: Launch) -> None:
    """End the test as skipped where this launch cannot work with the MPI that is here."""
    if launch.how == "horovodrun" and mpi_version() != ("Open MPI", 4):
        pytest.skip(f"horovodrun's MPI launcher is for Open MPI 4, found {' '.join(map(str, mpi_version()))}")


def command(launch: Launch, program: list[str]) -> list[str]:
    """The command line that starts `program` on the ranks of `launch`."""
    count = ["-np", str(launch.size)]
    if launch.how == "bare":
        return program
    if "+" in launch.how:
        return [sys.executable, str(Path(__file__).with_name("node_layout.py")), launch.how, *program]
    if launch.how == "gloo":
        return [find("horovodrun"), "--gloo", *count, *program]
    if launch.how == "horovodrun":
        return [find("horovodrun"), "--mpi", *count, *program]
    flags = []
    if mpi_version()[0] == "Open MPI":
        flags = ["--oversubscribe", "--bind-to", "none", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    return [find("mpirun"), *flags, *count, *program]


def environment() -> dict[str, str]:
    """Our own environment without any launcher's variables, with this Python's programs first on PATH."""
    kept = {name: value for name, value in os.environ.items() if not _FOREIGN.match(name)}
    kept["PATH"] = os.pathsep.join([str(BIN), kept.get("PATH", os.defpath)])
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    kept["PYTHONUNBUFFERED"] = "1"
    return kept


def run(launch: Launch, program: list[str], log: Path, limit: float) -> Ended:
    """Run `program` on the ranks of `launch` until it ends, or end it after `limit` seconds.

    `log` receives what all ranks print.
    """
    started = time.time()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command(launch, program),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            at = time.time()
            if process.poll() is None:
                _end(process)
    return Ended(code, log.read_text(errors="replace"), at - started, at)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and all that it started, politely first."""
    tree = [psutil.Process(process.pid)]
    tree += tree[0].children(recursive=True)
    process.terminate()
    _, alive = psutil.wait_procs(tree, timeout=10)
    for one in alive:
        one.kill()
    psutil.wait_procs(alive, timeout=10)
    process.wait(10)
