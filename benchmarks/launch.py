"""Starts the worker processes of one job, in a way that none of them outlives the orchestrator."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent


def launch(
    launched: list[subprocess.Popen[bytes]],
    mpi: bool,
    ranks: int,
    arguments: Sequence[str],
    limit: int,
    environment: dict[str, str],
    log: IO[bytes],
) -> None:
    """Adds what it starts to `launched`: mpirun, or the workers one by one. Raises FileNotFoundError without mpirun."""
    worker = [sys.executable, "-m", "benchmarks.worker", *arguments]
    if mpi:
        # mpirun passes a polite end on to its ranks, also to those that are stopped.
        launched.append(_start([*_mpirun(ranks, limit), *worker], environment, signal.SIGTERM, log))
        return
    hosts = [f"127.0.0.1:{port}" for port in _free_ports(ranks)]
    for rank in range(ranks):
        cluster = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": rank}}
        names = {"BENCHMARK_RANK": str(rank), "BENCHMARK_SIZE": str(ranks), "TF_CONFIG": json.dumps(cluster)}
        launched.append(_start(worker, {**environment, **names}, signal.SIGKILL, log))


def _mpirun(ranks: int, limit: int) -> list[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    mpirun = shutil.which("mpirun", path=path)
    if mpirun is None:
        raise FileNotFoundError("mpirun was found neither beside this Python nor on PATH: run scripts/setup.sh")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [mpirun, *root, "--oversubscribe", "--bind-to", "none", "--timeout", str(limit), "-np", str(ranks)]


def _start(
    command: list[str], environment: dict[str, str], death_signal: int, log: IO[bytes]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # A session of its own: Ctrl-C reaches the orchestrator alone, which then ends the jobs in order.
        start_new_session=True,
        preexec_fn=_end_with_parent(death_signal),
    )


def _end_with_parent(number: int) -> Callable[[], None]:
    """Something to run in a new child: it gets this signal when the orchestrator dies, even by SIGKILL."""
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(1, number)  # 1: PR_SET_PDEATHSIG


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
