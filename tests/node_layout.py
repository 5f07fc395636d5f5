"""Starts a program on ranks that believe to be on several nodes: node_layout.py 2+2 PROGRAM…

The processes run on this machine with Gloo, with the variables that `horovodrun --gloo` would give them on nodes of so
many ranks each. A rank that fails ends the others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict

from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.http.http_server import RendezvousServer

ADDRESS = "127.0.0.1"


def main(layout: str, program: list[str]) -> int:
    """Run the program on every rank; the exit code is that of the first rank to fail, or 0."""
    counts = [int(part) for part in layout.split("+")]
    hosts = [HostInfo(f"node{number}", count) for number, count in enumerate(counts)]
    plan = get_host_assignments(hosts, sum(counts))
    server = RendezvousServer(0)
    port = server.start()
    server.init(plan)
    # Ended politely, it still ends the ranks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    processes = [subprocess.Popen(program, env=variables(slot, port)) for slot in plan]
    try:
        return wait(processes)
    finally:
        for process in processes:
            process.kill()
        server.stop()


def variables(slot, port: int) -> dict[str, str]:
    """The environment of one rank."""
    told = {f"HOROVOD_{name.upper()}": str(value) for name, value in asdict(slot).items()}
    return {
        **os.environ,
        **told,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": ADDRESS,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def wait(processes: list[subprocess.Popen]) -> int:
    """Wait until all processes have ended or one has failed."""
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):
            return next(code for code in codes if code)
        if None not in codes:
            return 0
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
