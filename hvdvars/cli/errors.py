"""How the command ends when it cannot go on: one message for bad input, and a quick end when it is interrupted.

Other exceptions go on to the interpreter: `hvdvars.init` makes them end the job with the traceback of the failed rank.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from hvdvars import launchenv

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells give it."""

_LINGER_SECONDS = 2.0


class UsageError(Exception):
    """Bad input. ``said_by``: rank ``"0"`` (equal on all), each ``"node"``'s first rank (files) or ``"every"`` rank."""

    def __init__(self, message: str, said_by: str = "0") -> None:
        super().__init__(message)
        self.said_by = said_by


def launched_rank() -> int:
    """This process's rank as the launcher tells it, before Horovod is loaded; 0 where no launcher says anything."""
    return _launcher().rank or 0


def refuse(problem: UsageError) -> int:
    """Print the message, once for those ranks that share the reason, and give exit code 2 on all of them. Local."""
    launcher = _launcher()
    rank = launcher.rank or 0
    speaks = rank == 0 or problem.said_by == "every" or (problem.said_by == "node" and launcher.local_rank == 0)
    if speaks:
        where = f" (rank {rank} on {os.uname().nodename})" if rank else ""
        print(f"hvdvars: error{where}: {problem}", file=sys.stderr, flush=True)
        return 2
    # A launcher ends the job at the first exit that is not 0: let the rank that has something to say be the first.
    time.sleep(_LINGER_SECONDS)
    return 2


def interrupt() -> int:
    """End this rank, and with it the job, after Ctrl-C; comes back, with the exit code, where there is no other."""
    launcher = _launcher()
    if not launcher.rank:
        print("\nhvdvars: interrupted", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if launcher.size in (None, 1):
        return INTERRUPTED
    # The usual way out finalizes MPI, which waits for ranks that wait for this one in a collective.
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(INTERRUPTED)
    os._exit(INTERRUPTED)


def _launcher() -> launchenv.Launcher:
    try:
        return launchenv.detect()
    except ValueError:  # hvdvars.init says what is wrong with the launcher's variables.
        return launchenv.Launcher("none")
