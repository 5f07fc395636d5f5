"""Who is compared: the jobs (one environment each) and the contenders that run in them. Pure, no TensorFlow."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

UNTUNED = {"HVDVARS_TRANSPORT_DEFAULTS": "0"}


@dataclass(frozen=True)
class JobSpec:
    """One set of processes with an environment of its own: MPI reads its settings only once, when it starts.

    `suspend`: stop the processes while others are measured. TensorFlow's own workers are left alone: they idle without
    using the processor, and their coordination service takes a stopped process for a dead one.
    """

    name: str
    mpi: bool
    suspend: bool = True
    environment: dict[str, str] = field(default_factory=dict)


JOBS: dict[str, JobSpec] = {
    job.name: job
    for job in (
        JobSpec("none", mpi=False),
        JobSpec("mpi", mpi=True, environment=UNTUNED),
        JobSpec("mpi_tuned", mpi=True),
        JobSpec("plain", mpi=True, environment=UNTUNED),
        JobSpec("multiworker", mpi=False, suspend=False),
        JobSpec("hvdvars", mpi=True),
        JobSpec("untuned", mpi=True, environment=UNTUNED),
    )
}


@dataclass(frozen=True)
class Contender:
    """One way to do the work: `kind` names the builder in steps.py, `mode` and `options` are hvdvars.create's."""

    name: str
    job: str
    kind: str
    mode: str = ""
    options: dict[str, str] = field(default_factory=dict)
    optimizer: str = "sgd"

    def as_dict(self) -> dict[str, object]:
        """The same as plain JSON values."""
        return asdict(self)


BASELINES = (
    Contender("none", "none", "none"),
    Contender("mpi4py", "mpi", "mpi4py"),
    Contender("mpi4py/tuned", "mpi_tuned", "mpi4py"),
    Contender("plain/per_tensor", "plain", "per_tensor"),
    Contender("plain/grouped", "plain", "grouped"),
    Contender("multiworker/ring", "multiworker", "multiworker"),
)
# The floor for anything that packs: by hand, and nothing but a concatenation, one all-reduce and a split.
PACKED = Contender("by_hand/packed", "hvdvars", "packed", "horovod")
PLAIN = ("plain/per_tensor", "plain/grouped")
# What a mode cannot be created without.
REQUIRED_OPTIONS: dict[str, dict[str, str]] = {"distributed_all_reduce": {"all_reduce_spec": "xring:32k:pscpu"}}


def managed_modes() -> tuple[Contender, ...]:
    """Every mode that this version of hvdvars offers, element placement beside placement by variables."""
    from hvdvars import options

    found = []
    for mode in options.MODES:
        required = REQUIRED_OPTIONS.get(mode, {})
        try:
            options.resolve(mode, **required)
        except ValueError:
            continue
        found.append(Contender(f"hvdvars/{mode}", "hvdvars", "hvdvars", mode, required))
        if mode == "parameter_server":
            placed = {"placement": "elements"}
            found.append(Contender(f"hvdvars/{mode}/elements", "hvdvars", "hvdvars", mode, placed))
    return tuple(found)


UNTUNED_MODES = (Contender("untuned/horovod", "untuned", "hvdvars", "horovod"),)


def update_contenders(patterns: Iterable[str], *, untuned: bool) -> list[Contender]:
    """Contenders of the update step whose name matches one of the shell patterns (none given: all).

    ValueError naming a pattern that matches nothing.
    """
    everyone = [*BASELINES, PACKED, *managed_modes(), *(UNTUNED_MODES if untuned else ())]
    patterns = list(patterns)
    for pattern in patterns:
        if not any(fnmatch.fnmatch(contender.name, pattern) for contender in everyone):
            names = ", ".join(contender.name for contender in everyone)
            raise ValueError(f"--contenders {pattern}: no such contender; choose from {names}")
    if not patterns:
        return everyone
    return [one for one in everyone if any(fnmatch.fnmatch(one.name, pattern) for pattern in patterns)]


ADAM = (
    Contender("adam/horovod", "hvdvars", "hvdvars", "horovod", optimizer="adam"),
    Contender("adam/parameter_server", "hvdvars", "hvdvars", "parameter_server", optimizer="adam"),
    Contender(
        "adam/parameter_server/elements",
        "hvdvars",
        "hvdvars",
        "parameter_server",
        {"placement": "elements"},
        optimizer="adam",
    ),
)
OVERHEAD = (
    Contender("hvdvars/horovod", "hvdvars", "hvdvars", "horovod"),
    Contender("by_hand", "hvdvars", "by_hand", "horovod"),
)
BROADCAST = (
    Contender("hvdvars.broadcast", "hvdvars", "hvdvars_broadcast", "horovod"),
    Contender("hvd.broadcast_variables", "plain", "plain_broadcast"),
)
