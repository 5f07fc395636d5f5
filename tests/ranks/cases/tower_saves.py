"""Checkpoints of graphs of TensorFlow 1: saved in one mode by rank 0, restored in another, with all that there is."""

import os
import shutil
import tempfile

import numpy as np
import tensorflow as tf

import hvdvars as hv

from . import case
from .tools import close
from .tower_graphs import MODES, WEIGHTS, Job, everything_of_one_process, factor_of

v1 = tf.compat.v1

KEPT = {
    "owners": ("parameter_server", {}, 1),
    "owners2": ("parameter_server", {}, 2),
    "masters": ("distributed_replicated", {}, 1),
    "masters2": ("distributed_replicated", {}, 2),
    "replicated": ("replicated", {}, 1),
    "replicated2": ("replicated", {}, 2),
    "hybrid": (*MODES["hybrid"], 1),
}
PAIRS = {
    f"{first}-{second}-{optimizer}": (first, second, optimizer)
    for first, second, optimizer in [
        ("owners", "replicated", "adam"),
        ("replicated", "owners", "adam"),
        ("masters", "owners", "momentum"),
        ("owners", "masters", "adam"),
        ("owners", "owners2", "momentum"),
        ("replicated2", "masters2", "adam"),
        ("masters2", "hybrid", "adam"),
    ]
}
FEW = {name: PAIRS[name] for name in ("owners-replicated-adam", "replicated-owners-adam", "owners-masters-adam")}
BEFORE, AFTER = 7, 12


def build(world, kept, optimizer):
    mode, options, towers = KEPT[kept]
    replicas = world.size * towers
    # A sum over the replicas in one mode, and a mean in the other: both are brought to the mean.
    scale = 1.0 / factor_of(mode, replicas)
    return Job(world, hv.create(mode, local_towers=towers, **options), optimizer, towers, scale=scale)


def train(job, steps):
    for _ in range(steps):
        job.session.run([job.train, job.updates])


def shared_folder(world):
    made = tempfile.mkdtemp() if world.rank == 0 else None
    return world.meeting.gather_objects(made, "tests.tower_saves")[0]


def save(world, job, folder):
    """Every rank runs what brings the values together; rank 0 alone writes."""
    job.session.run(job.before_save)
    if world.rank == 0:
        v1.train.Saver(job.saved).save(job.session, os.path.join(folder, "run"))
    hv.barrier()


def restore(world, job, folder):
    job.session.run(v1.global_variables_initializer())
    if world.rank == 0:
        v1.train.Saver(job.saved).restore(job.session, os.path.join(folder, "run"))
    job.ready()


def agrees(world, job, wanted, what):
    """Rank 0 saves the values of one process, and all ranks and towers have the weights and the moving averages."""
    job.session.run(job.before_save)
    if world.rank == 0:
        assert set(job.saved) == set(wanted), (what, set(job.saved) ^ set(wanted))
        for name, variable in sorted(job.saved.items()):
            close(np.asarray(job.session.run(variable)), np.asarray(wanted[name]), f"{what}: {name}", 5e-5)
    job.check(world, {name: wanted[name] for name in WEIGHTS})


def moving(job):
    """The values of every tower's untrained variable."""
    variables = [*v1.global_variables(), *v1.local_variables()]
    return [job.session.run(v).tolist() for v in variables if v.name.endswith("/moving:0")]


@case(params=PAIRS, sizes=(2,), hows=("mpi",))
@case(params=FEW, sizes=(3,), hows=("mpi",))
def a_run_goes_on_in_another_mode(world, chosen):
    first, second, optimizer = chosen
    folder = shared_folder(world)
    before = everything_of_one_process(world, optimizer, 1.0, BEFORE)
    after = everything_of_one_process(world, optimizer, 1.0, AFTER)
    with tf.Graph().as_default():
        job = build(world, first, optimizer)
        job.start()
        train(job, BEFORE)
        agrees(world, job, before, f"saved by {first}")
        save(world, job, folder)
    with tf.Graph().as_default():
        job = build(world, second, optimizer)
        restore(world, job, folder)
        agrees(world, job, before, f"restored by {second}")
        assert moving(job) and all(value == before["moving"].tolist() for value in moving(job)), moving(job)
        train(job, AFTER - BEFORE)
        agrees(world, job, after, f"gone on in {second}")
    hv.barrier()
    if world.rank == 0:
        shutil.rmtree(folder)
