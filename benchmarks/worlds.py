"""How a rank of each job joins the others, each as its users do."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _nothing() -> None:
    """For worlds whose first collective aligns the ranks, or that have none."""


@dataclass(frozen=True)
class World:
    """Who this rank is; `align` returns on every rank at about the same time; `link` is the library's own handle."""

    rank: int
    size: int
    align: Callable[[], None] = _nothing
    link: Any = None


def join(job: str) -> World:
    """Collective: every rank of the job calls it once. Initialises the library that the job is about."""
    return _JOIN[job]()


def _alone() -> World:
    return World(int(os.environ["BENCHMARK_RANK"]), int(os.environ["BENCHMARK_SIZE"]))


def _mpi() -> World:
    from mpi4py import MPI

    return World(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, MPI.COMM_WORLD.Barrier, MPI)


def _mpi_tuned() -> World:
    from hvdvars import launchenv

    launchenv.prepare_environment(launchenv.detect())
    return _mpi()


def _plain() -> World:
    import horovod.tensorflow as hvd

    hvd.init()
    return World(hvd.rank(), hvd.size(), _horovod_barrier())


def _hvdvars() -> World:
    import hvdvars as hv

    hv.init()
    return World(hv.rank(), hv.size(), _horovod_barrier())


def _horovod_barrier() -> Callable[[], None]:
    """The same few bytes of plain Horovod for every Horovod job: it has no barrier for TensorFlow."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    one = tf.Variable(1.0, trainable=False)

    @tf.function
    def barrier() -> None:
        one.assign(hvd.allreduce(one.read_value(), name="benchmark_barrier", op=hvd.Average))

    return barrier


def _multiworker() -> World:
    import tensorflow as tf

    ring = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
    alone = _alone()
    if strategy.num_replicas_in_sync != alone.size:
        raise RuntimeError(f"MultiWorkerMirroredStrategy: expected {alone.size} replicas, got {strategy}")
    return World(alone.rank, alone.size, link=(strategy, ring))


_JOIN: dict[str, Callable[[], World]] = {
    "none": _alone,
    "mpi": _mpi,
    "mpi_tuned": _mpi_tuned,
    "plain": _plain,
    "multiworker": _multiworker,
    "hvdvars": _hvdvars,
    "untuned": _hvdvars,
}
