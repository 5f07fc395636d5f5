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
SIZES = [1, 0, 7, 1001]


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


def gradients(rank, dtypes):
    generator = np.random.default_rng(rank)
    whole = [generator.integers(-50, 50, size) for size in SIZES]
    return [tf.cast(numbers / (1 if dtype == "int32" else 7), dtype) for dtype in dtypes for numbers in whole]


def check_reduction(world, mgr, dtypes, combine):
    """Reduce gradients of all these dtypes in one graph, compare with what numpy makes of them, and give the graph."""
    ours = gradients(world.rank, dtypes)
    variables = [tf.Variable(tf.zeros_like(grad)) for grad in ours]
    function = tf.function(lambda grads: mgr.reduce(grads, variables), autograph=False)
    reduced = function(ours)
    for result, *grads in zip(reduced, *(gradients(rank, dtypes) for rank in world.ranks), strict=True):
        assert result.dtype == grads[0].dtype
        wanted = combine([grad.numpy().astype("float64") for grad in grads], 0)
        close(result, wanted, f"{result.dtype.name} {result.shape}", 1e-2 if result.dtype == "float16" else 1e-5)
    same_everywhere(world, digest(*reduced), "the sums")
    return function.get_concrete_function(ours)


@case(params=[*FLAT, *IN_STAGES, *HYBRID], sizes=(1, 2, 3, 4), hows=("mpi",))
@case(params=[*IN_STAGES, *HYBRID], sizes=(4,), hows=("2+2",))
@case(params=["nccl/rechd", "pscpu/pscpu#5"], sizes=(4, 5), hows=("3+2", "1+1+1+1"))
def the_numbers_of_a_plain_all_reduce(world, text):
    mgr = create(text)
    function = check_reduction(world, mgr, ["float32"], np.mean)
    (plan,) = mgr.report()["plans"]
    counts = world.meeting.gather_objects(len(horovod_operations(function)), "tests.operations")
    assert max(counts) == counts[0] == plan["collectives_per_step"], (counts, plan)
    assert sum(part["collectives"] for part in plan["ranges"]) == plan["collectives_per_step"]
    assert sum(part["tensors"] for part in plan["ranges"]) == sum(size > 0 for size in SIZES)
    uneven = len(set(layout_of(world))) > 1
    for part in plan["ranges"]:
        assert ("different numbers of ranks" in part["runs_as"]) == (uneven and "/" in part["alg"]), part


@case(params=["nccl/rechd", "pscpu/pscpu#5"], sizes=(3, 4), hows=("mpi", "2+2"))
def half_precision_and_whole_numbers(world, text):
    check_reduction(world, create(text), ["float16"], np.mean)
    check_reduction(world, create(text, average=False), ["int32"], np.sum)


@case(sizes=(2, 3, 4), hows=("mpi",))
def halving_doubling_on_any_number_of_ranks(world):
    from hvdvars import hierarchy, session

    @tf.function(autograph=False)
    def summed(buffers):
        return [hierarchy.halving_doubling(x, f"tests.halving{x.shape[0]}", session.everyone()) for x in buffers]

    buffers = [tf.range(length, dtype=tf.float32) * (world.rank + 1) for length in (1, 5, 64)]
    for result in summed(buffers):
        close(result, np.arange(len(result)) * world.size * (world.size + 1) / 2)


# Of one buffer, on two nodes of two ranks: what is sent in the node, across nodes, and in the node again.
MOVED = {
    "nccl/xring": "Alltoall node, Allreduce across, Allgather node",
    "nccl/rechd": "Alltoall node, Alltoall across, Alltoall across, Allgather node",
    "nccl/pscpu": "Alltoall node, Alltoall across cpu, Allgather across cpu, Allgather node",
    "pscpu/pscpu#5": "Alltoall node cpu, Alltoall across cpu, Allgather across cpu, Allgather node cpu",
}


@case(params=MOVED, sizes=(4,), hows=("2+2",))
def each_stage_goes_by_its_own_process_set(world, wanted):
    from hvdvars import hierarchy

    text = next(name for name in MOVED if MOVED[name] == wanted)
    place = hierarchy.current()
    assert 0 not in (place.node.number, place.across.number)
    names = {place.node.number: "node", place.across.number: "across"}
    mgr, variable = create(text), tf.Variable(tf.zeros([1000]))
    function = tf.function(lambda x: mgr.reduce([x], [variable]), autograph=False)
    found = []
    for op in function.get_concrete_function(tf.ones([1000])).graph.get_operations():
        if op.type.startswith("Horovod"):
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
