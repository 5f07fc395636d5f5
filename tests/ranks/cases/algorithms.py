"""Every algorithm of a spec: the numbers of a plain all-reduce, the same bits everywhere, moved as its name says.

Under MPI, all ranks are on one machine; on 3 and 4 ranks they are told that they are on several nodes.
"""

import os
import warnings
from collections import Counter

import numpy as np
import tensorflow as tf

import hvdvars as hv

from . import LAYOUTS, case
from .tools import close, digest, horovod_operations, raised, same_everywhere

FLAT = ["nccl", "pscpu", "psgpu#5"]
IN_STAGES = ["nccl/xring", "nccl/rechd", "nccl/pscpu", "pscpu/pscpu", "pscpu/pscpu#5"]
HYBRID = ["pscpu/pscpu#2:3:psgpu:60:nccl/rechd"]
PRETENDED = {3: (0, 1, 2), 4: (0, 0, 1, 1)}
SIZES = [1, 2, 0, 7, 1001]


def layout_of(world):
    """How many ranks each node has."""
    if world.how in LAYOUTS:
        return [int(part) for part in world.how.split("+")]
    return list(Counter(PRETENDED.get(world.size, [0] * world.size)).values())


def create(text, **options):
    mode = "distributed_all_reduce" if ":" in text else "replicated"
    return hv.create(mode, all_reduce_spec=text, allow_cpu="nccl" in text, fusion="none", **options)


@case(sizes=(1, 2, 3, 4), hows=("mpi",))
@case(sizes=(4, 5), hows=LAYOUTS)
def nodes_are_found_once_and_uneven_ones_reported(world):
    from hvdvars import hierarchy

    if world.how == "mpi" and world.size in PRETENDED:
        os.environ["HOROVOD_HOSTNAME"] = f"node{PRETENDED[world.size][world.rank]}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        create("nccl/xring")
        first = hierarchy.current()
        create("nccl/rechd")
    os.environ.pop("HOROVOD_HOSTNAME", None)
    assert hierarchy.current() is first
    layout = layout_of(world)
    assert first.nodes == len(layout)
    uneven = len(set(layout)) > 1
    told = [str(one.message) for one in caught if "two stages" in str(one.message)]
    assert len(told) == (1 if uneven and world.rank == 0 else 0), told
    assert (first.node is None) == uneven
    if not uneven:
        assert (first.node.size, first.across.size) == (layout[0], len(layout))
        assert world.rank in first.node.ranks and world.rank in first.across.ranks


def gradients(rank, dtype):
    generator = np.random.default_rng(rank)
    return [tf.cast(generator.integers(-50, 50, size) / (1 if dtype == "int32" else 7), dtype) for size in SIZES]


@case(params=[*FLAT, *IN_STAGES, *HYBRID], sizes=(1, 2, 3, 4), hows=("mpi",))
@case(params=[*IN_STAGES, *HYBRID], sizes=(4, 5), hows=LAYOUTS)
def the_numbers_of_a_plain_all_reduce(world, text):
    tolerances = {"float32": 1e-5, "float16": 1e-2}
    ours = [grad for dtype in tolerances for grad in gradients(world.rank, dtype)]
    reduced = create(text).reduce(ours, [tf.Variable(tf.zeros_like(grad)) for grad in ours])
    everyones = [[grad for dtype in tolerances for grad in gradients(rank, dtype)] for rank in world.ranks]
    for result, *grads in zip(reduced, *everyones, strict=True):
        wanted = np.mean([grad.numpy().astype("float64") for grad in grads], 0)
        assert result.dtype == grads[0].dtype
        close(result, wanted, f"{text} {result.dtype.name} {result.shape}", tolerances[result.dtype.name])
    same_everywhere(world, digest(*reduced), "the sums")


@case(params=[*IN_STAGES, *HYBRID], sizes=(2, 3, 4), hows=("mpi",))
@case(params=["nccl/rechd", "pscpu/pscpu#5"], sizes=(4, 5), hows=LAYOUTS)
def whole_numbers_are_summed_exactly(world, text):
    ours = gradients(world.rank, "int32")
    reduced = create(text, average=False).reduce(ours, [tf.Variable(tf.zeros_like(grad)) for grad in ours])
    for result, *grads in zip(reduced, *(gradients(rank, "int32") for rank in world.ranks), strict=True):
        assert (result.numpy() == sum(grad.numpy() for grad in grads)).all()


@case(sizes=(1, 2, 3, 4), hows=("mpi",))
def halving_doubling_on_any_number_of_ranks(world):
    from hvdvars import hierarchy, session

    for length in (1, 2, 5, 64):
        buffer = tf.range(length, dtype=tf.float32) * (world.rank + 1)
        summed = hierarchy.halving_doubling(buffer, f"tests.halving{length}", session.everyone())
        close(summed, np.arange(length) * world.size * (world.size + 1) / 2)


def traced(text):
    """The manager, and its reduction of one large and one small gradient as a concrete function."""
    mgr = create(text)
    variables = [tf.Variable(tf.zeros([1000])), tf.Variable(tf.zeros([1]))]

    @tf.function(autograph=False)
    def reduce(x):
        return mgr.reduce([tf.fill(variable.shape, x) for variable in variables], variables)

    return mgr, reduce.get_concrete_function(tf.constant(1.0))


@case(params=[*FLAT, *IN_STAGES, "pscpu/pscpu#2:3:nccl/rechd"], sizes=(1, 2, 3, 4), hows=("mpi",))
@case(params=IN_STAGES, sizes=(4, 5), hows=LAYOUTS)
def the_graph_has_the_reported_collectives(world, text):
    mgr, function = traced(text)
    (plan,) = mgr.report()["plans"]
    counts = world.meeting.gather_objects(len(horovod_operations(function)), "tests.operations")
    assert max(counts) == counts[0] == plan["collectives_per_step"], (counts, plan)
    assert sum(part["collectives"] for part in plan["ranges"]) == plan["collectives_per_step"]
    assert sum(part["tensors"] for part in plan["ranges"]) == 2
    uneven = len(set(layout_of(world))) > 1
    for part in plan["ranges"]:
        assert ("different numbers of ranks" in part["runs_as"]) == (uneven and "/" in part["alg"]), part


# Of the first bucket, on two nodes of two ranks: what is sent in the node, across nodes, and in the node again.
MOVED = {
    "nccl/xring": "Alltoall node, Allreduce across, Allgather node",
    "nccl/rechd": "Alltoall node, Alltoall across, Alltoall across, Allgather node",
    "nccl/pscpu": "Alltoall node, Alltoall across cpu, Allgather across cpu, Allgather node",
    "pscpu/pscpu#5": "Alltoall node cpu, Alltoall across cpu, Allgather across cpu, Allgather node cpu",
}


@case(params=MOVED, sizes=(4,), hows=("mpi", "2+2"))
def each_stage_goes_by_its_own_process_set(world, wanted):
    from hvdvars import hierarchy

    text = next(name for name in MOVED if MOVED[name] == wanted)
    place = hierarchy.current()
    assert 0 not in (place.node.number, place.across.number)
    names = {place.node.number: "node", place.across.number: "across"}
    found = []
    for op in traced(text)[1].graph.get_operations():
        if op.type.startswith("Horovod") and ".0.0." in op.name:
            device = " cpu" if "CPU" in op.device else ""
            found.append(f"{op.type.removeprefix('Horovod')} {names[op.get_attr('process_set_id')]}{device}")
    assert ", ".join(found) == wanted, found


@case(sizes=(1, 2), hows=("mpi",))
def nccl_needs_a_build_with_it_or_leave_to_use_the_cpu(world):
    if world.collectives.nccl_built():
        return
    for mode, text in [("replicated", "nccl/xring"), ("distributed_all_reduce", "xring:4K:nccl")]:
        message = raised(RuntimeError, lambda m=mode, t=text: hv.create(m, all_reduce_spec=t))
        assert "NCCL=1 scripts/setup.sh" in message and "allow_cpu=True" in message and repr(text) in message
        assert hv.create(mode, all_reduce_spec=text, allow_cpu=True).report()["options"]["allow_cpu"]
