"""Horovod's collectives as thin, checked functions with stable names: the only file that imports `horovod.tensorflow`.

Each collective takes a tensor and a `name` that is equal on every rank, and exists once: wire types that Horovod lacks
are converted here, one rank needs no communication, and eager calls run through a cached `tf.function`, because Horovod
ignores the names of eager calls and would add up whatever comes first.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdvars import check, launchenv, session, wire
from hvdvars.session import Group, World, everyone, world

_SAME_SHAPE = ("allreduce", "grouped_allreduce", "broadcast")
"""Operations whose results have the shapes of what they are given."""

_watchers: list[list[Any]] = []

_uses: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def init() -> None:
    """Join the world: start MPI or Gloo and Horovod, pin the GPU, share out the CPUs. Calling it again does nothing.

    Collective: every rank calls it first. The launcher's environment decides between MPI and Gloo; settings that make
    MPI faster are made where the user made none (`HVDVARS_TRANSPORT_DEFAULTS=0` leaves them alone).

    Raises:
        RuntimeError: the launcher started several processes, and each would be rank 0 of 1.
    """
    if session.is_started():
        return
    launcher = launchenv.detect()
    launchenv.prepare_environment(launcher)
    session.keep_memory()
    mpi = None if launcher.name == "horovodrun-gloo" else session.start_mpi()
    # Started a second time, Gloo may find addresses of the first at the rendezvous and wait for ever: process sets must
    # be possible from the beginning. That costs an exchange in each of Horovod's cycles, so not on a single node.
    hvd.init(process_sets="dynamic" if mpi is None and launchenv.spans_nodes(launcher) else None)
    launchenv.refuse_split_world(launcher, hvd.size())
    nodes, masks = _look_around(mpi)
    session.pin_gpu(hvd.local_rank())
    session.set_threads(masks, hvd.local_rank())
    place = World(
        rank=hvd.rank(),
        size=hvd.size(),
        local_rank=hvd.local_rank(),
        local_size=hvd.local_size(),
        cross_rank=hvd.cross_rank(),
        cross_size=hvd.cross_size(),
        nodes=nodes,
        transport=_transport(),
    )
    session.end_job_on_error(place, mpi)
    session.start(place)


def shutdown() -> None:
    """Leave the world; `init` may be called again. Collective: every rank calls it."""
    hvd.shutdown()
    session.stop()


def is_initialized() -> bool:
    """Whether this process is part of a world. Local."""
    return session.is_started()


def make_groups(sets: Sequence[Sequence[int]]) -> list[Group]:
    """Make process sets of these ranks, each set ascending and none twice; sets of all ranks or of one need none.

    Collective: every rank calls it at the same place with the same sets, once in a world, outside of graphs and while
    nothing else is being sent: under MPI Horovod is started anew, which takes some milliseconds.
    """
    needed = [tuple(ranks) for ranks in sets if 1 < len(ranks) < world().size]
    made = [hvd.ProcessSet(list(ranks)) for ranks in needed]
    if made and os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1":
        for one in made:
            hvd.add_process_set(one)
    elif made:
        # Sets that are known at the start cost nothing later; adding them would take an exchange in every cycle.
        hvd.shutdown()
        hvd.init(process_sets=made)
    numbers = {ranks: one.process_set_id for ranks, one in zip(needed, made, strict=True)}
    return [Group(tuple(ranks), numbers.get(tuple(ranks), 0)) for ranks in sets]


def nccl_built() -> bool:
    """Whether this Horovod was built with NCCL. Local."""
    return bool(hvd.nccl_built())


def all_reduce(tensor: tf.Tensor, name: str, scale: float = 1.0, group: Group | None = None) -> tf.Tensor:
    """Sum `tensor` over the ranks of `group` (None: all) and multiply the sum by `scale`.

    Collective: every rank of the group calls it in the same order. Shape and dtype are equal on all ranks and are those
    of the result, which is bit-equal on all ranks.

    Raises:
        TypeError: bool and string tensors have no sum; integers have no exact scaled sum.
    """
    return all_reduce_group([tensor], name, scale, group)[0]


def all_reduce_group(
    tensors: Sequence[tf.Tensor], name: str, scale: float = 1.0, group: Group | None = None
) -> list[tf.Tensor]:
    """Sum each tensor over the ranks of `group` (None: all), as one Horovod group: they travel together or not at all.

    Collective: every rank of the group calls it in the same order. The results are in the order of `tensors`, of which
    all have one dtype.

    Raises:
        TypeError: as in `all_reduce`, or the dtypes differ.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    dtype = _one_dtype("all_reduce", tensors, name)
    carrier = wire.reduction_type("all_reduce", dtype, name, scale)
    members = group or everyone()

    def communicate(name: str, *tensors: tf.Tensor) -> list[tf.Tensor]:
        sent = [wire.to_wire(tensor, carrier) for tensor in tensors]
        operation = "allreduce" if len(sent) == 1 else "grouped_allreduce"
        received = _operate(operation, sent, name, members, **_sum(scale))
        return [wire.from_wire(summed, dtype, tensor) for summed, tensor in zip(received, tensors, strict=True)]

    if members.size == 1:
        return [_scaled(tensor, scale) for tensor in tensors]
    return _call(f"all_reduce:{members.number}:{scale}", communicate, name, *tensors)


def all_gather(tensor: tf.Tensor, name: str, group: Group | None = None) -> tf.Tensor:
    """Join the tensors of the ranks of `group` (None: all) along the first dimension, in rank order.

    Collective: every rank of the group calls it in the same order. The first dimension may differ between ranks, the
    others and the dtype may not. A scalar counts as a vector of one element.

    Raises:
        TypeError: the dtype cannot be sent.
    """
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank == 0:
        tensor = tf.reshape(tensor, [1])
    dtype, carrier = tensor.dtype, wire.transfer_type("all_gather", tensor.dtype, name)
    members = group or everyone()

    def communicate(name: str, tensor: tf.Tensor) -> list[tf.Tensor]:
        (gathered,) = _operate("allgather", [wire.to_bits(tensor, carrier)], name, members)
        return [wire.from_bits(gathered, dtype)]

    if members.size == 1:
        return tf.identity(tensor)
    return _call(f"all_gather:{members.number}", communicate, name, tensor)[0]


def broadcast(tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
    """Give every rank the tensor of rank `root`.

    Collective: every rank of the group calls it in the same order, with tensors of one shape and dtype.

    Raises:
        ValueError: there is no rank `root`.
        TypeError: the dtype cannot be sent.
    """
    tensor = tf.convert_to_tensor(tensor)
    if not 0 <= root < world().size:
        raise ValueError(f"broadcast: root of '{name}' is rank {root}, but ranks go from 0 to {world().size - 1}.")
    dtype, carrier = tensor.dtype, wire.transfer_type("broadcast", tensor.dtype, name)

    def communicate(name: str, tensor: tf.Tensor) -> list[tf.Tensor]:
        (sent,) = _operate("broadcast", [wire.to_bits(tensor, carrier)], name, root_rank=root)
        return [wire.from_bits(sent, dtype)]

    if world().size == 1:
        return tf.identity(tensor)
    return _call(f"broadcast:{root}", communicate, name, tensor)[0]


def all_to_all(tensor: tf.Tensor, splits: Sequence[int], name: str, group: Group | None = None) -> tf.Tensor:
    """Send `splits[r]` elements along the first dimension to rank r; receive what the others send here, in rank order.

    Collective: every rank of the group calls it in the same order. `splits` has one entry per rank of `group` (None:
    all) and sums to the first dimension.

    Raises:
        ValueError: `splits` does not have one entry per rank.
        TypeError: the dtype cannot be sent.
    """
    tensor = tf.convert_to_tensor(tensor)
    members = group or everyone()
    if len(splits) != members.size:
        raise ValueError(
            f"all_to_all: '{name}' has {len(splits)} splits on rank {world().rank}, expected one for each of "
            f"{members.size} ranks."
        )
    dtype, carrier = tensor.dtype, wire.transfer_type("all_to_all", tensor.dtype, name)

    def communicate(name: str, tensor: tf.Tensor) -> list[tf.Tensor]:
        counts = tf.constant(list(splits), tf.int32)
        received, _ = _operate("alltoall", [wire.to_bits(tensor, carrier)], name, members, splits=counts)
        return [wire.from_bits(received, dtype)]

    if members.size == 1:
        return tf.identity(tensor)
    return _call(f"all_to_all:{members.number}:{tuple(splits)}", communicate, name, tensor)[0]


def reduce_scatter(tensor: tf.Tensor, name: str, scale: float = 1.0) -> tf.Tensor:
    """Sum `tensor` over all ranks, times `scale`; keep this rank's equal part of the first dimension.

    Collective: every rank of the group calls it in the same order. The first dimension is a multiple of the number of
    ranks, and equal on all of them.

    Raises:
        TypeError: as in `all_reduce`.
        ValueError: the first dimension is not a multiple of the number of ranks.
    """
    tensor = tf.convert_to_tensor(tensor)
    length = check.length_of(tensor) if tensor.shape.rank else None
    if length is None or length % world().size:
        raise ValueError(
            f"reduce_scatter: '{name}' has shape {tensor.shape} on rank {world().rank}; the first dimension must be a "
            f"multiple of the {world().size} ranks. Pad it."
        )
    dtype, carrier = tensor.dtype, wire.reduction_type("reduce_scatter", tensor.dtype, name, scale)
    carrier = carrier if carrier in wire.SCATTERED else "int32"

    def communicate(name: str, tensor: tf.Tensor) -> list[tf.Tensor]:
        (part,) = _operate("reducescatter", [wire.to_wire(tensor, carrier)], name, **_sum(scale))
        return [wire.from_wire(part, dtype, tensor[: length // world().size])]

    if world().size == 1:
        return _scaled(tensor, scale)
    return _call(f"reduce_scatter:{scale}", communicate, name, tensor)[0]


def _transport() -> str:
    if hvd.nccl_built() and tf.config.list_physical_devices("GPU"):
        return "NCCL"
    return "MPI" if hvd.mpi_enabled() else "Gloo"


def _look_around(mpi: Any) -> tuple[int, list[list[int]]]:
    """How many nodes there are, and the allowed CPUs of every rank of this one, in order of local rank."""
    mine = launchenv.allowed_cpus()
    if mpi is None:
        # Asking the others would start TensorFlow's threads. No launcher binds Gloo ranks one by one.
        return hvd.cross_size(), [mine] * hvd.local_size()
    found = mpi.COMM_WORLD.allgather((mpi.Get_processor_name(), hvd.local_rank(), mine))
    here = sorted((local, mask) for node, local, mask in found if node == mpi.Get_processor_name())
    return sum(local == 0 for _, local, _ in found), [mask for _, mask in here]


def _operate(
    operation: str, tensors: list[tf.Tensor], name: str, group: Group | None = None, **attributes: Any
) -> list[tf.Tensor]:
    """One of Horovod's operations in a graph, where it runs once a step on every rank, whatever is optimized there.

    TensorFlow takes these operations for pure functions. It would run one on constants while it optimizes the graph,
    and never again; merge two of equal input; and drop one whose result is not used. Where only one rank's graph gives
    the occasion, the others wait for it for ever.
    """
    # Scopes are ignored so that a rank that traces again keeps the names.
    common = {"name": _unique(name), "ignore_name_scope": True, "process_set_id": group.number if group else 0}
    _take_order(name)
    held = [_held(tensor) for tensor in tensors]
    several = operation.startswith("grouped_")
    found = getattr(hvd.mpi_ops.MPI_LIB, f"horovod_{operation}")(held if several else held[0], **attributes, **common)
    results = list(found) if isinstance(found, (list, tuple)) else [found]
    # An assertion always runs, and this one needs the result.
    asserted = tf.raw_ops.Assert(condition=tf.constant(True), data=[_seen(results[0])])
    if not _is_function(tf.compat.v1.get_default_graph()):
        # A graph of TensorFlow 1 runs only what somebody asks for.
        for made in _watchers:
            made.append(asserted)
        with tf.control_dependencies([asserted]):
            results = [tf.identity(result) for result in results]
    if operation in _SAME_SHAPE:
        for result, tensor in zip(results, tensors, strict=True):
            result.set_shape(tensor.shape)
    return results


@contextlib.contextmanager
def watched() -> Iterator[list[tf.Operation]]:
    """A list of operations that run the collectives made inside, in a graph of TensorFlow 1: what nobody asks for there
    does not run, and other ranks may ask for their part. Local.
    """
    made: list[tf.Operation] = []
    _watchers.append(made)
    try:
        yield made
    finally:
        _watchers.pop()


def _seen(result: tf.Tensor) -> tf.Tensor:
    """As little of a result as tells that it is there: what is on a device is copied to the host for the assertion."""
    if result.shape.rank == 0:
        return result
    if _is_function(tf.compat.v1.get_default_graph()):
        return tf.shape(result)
    # In a graph of TensorFlow 1 a shape may be found out before it runs; a value may not.
    return tf.reshape(result, [-1])[:1]


def _take_order(name: str) -> None:
    """Write to a variable of this name: functions inside a function that use it then run one after the other."""
    with tf.init_scope():
        if not tf.executing_eagerly():
            return  # a graph of TensorFlow 1 has no functions of ours inside
        order = _own_variable(name, 0)
    order.assign_add(0, read_value=False)


def _held(tensor: tf.Tensor) -> tf.Tensor:
    """`tensor` itself, not copied, as a slice that begins where only the graph says that runs."""
    rank = tensor.shape.rank
    if rank is None:
        return tensor
    if rank == 0:
        return tf.reshape(_held(tf.reshape(tensor, [1])), [])
    return tf.slice(tensor, _unknown_zeros(rank), [-1] * rank)


def _unknown_zeros(count: int) -> tf.Tensor:
    with tf.init_scope():
        eager = tf.executing_eagerly()
        zeros = _own_variable(f"zeros {count}", [0] * count) if eager else None
    if zeros is not None:
        return zeros.read_value()
    # A graph of TensorFlow 1 has no place for the variable. Numbers from 0 up to, but not including, 1 do as well.
    with tf.device("/CPU:0"):
        return tf.raw_ops.RandomUniformInt(shape=[count], minval=0, maxval=1)


_own: dict[str, tf.Variable] = {}


def _own_variable(key: str, value: Any) -> tf.Variable:
    """The variable of this key, made when it is first asked for.

    It is made in a thread of its own, out of reach of the scopes around the caller: a `tf.function` that is traced
    again lets nobody make variables.
    """

    def make() -> None:
        with tf.device("CPU:0"):
            _own[key] = tf.Variable(value, dtype=tf.int32, trainable=False, name="hvdvars_own")

    if key not in _own:
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    return _own[key]


def evaluate(communicate: Callable[[], tf.Tensor]) -> np.ndarray:
    """The value of a tensor that `communicate` makes with collectives, at once, whatever graph is being built.

    Collective: every rank of the group calls it in the same order. A program that has turned TensorFlow 2's behaviour
    off, or is inside a graph of TensorFlow 1, gets a graph and a session of its own for it.
    """
    with tf.init_scope():
        if tf.executing_eagerly():
            return communicate().numpy()
    # Threads and devices of its own: what is set in the first session of a process holds for all later ones.
    settings = tf.compat.v1.ConfigProto(
        use_per_session_threads=True, intra_op_parallelism_threads=1, inter_op_parallelism_threads=2
    )
    settings.device_count["GPU"] = 0
    with tf.Graph().as_default(), tf.compat.v1.Session(config=settings) as session_:
        return session_.run(communicate())


def _sum(scale: float) -> dict[str, Any]:
    return {"reduce_op": hvd.Sum, "prescale_factor": 1.0, "postscale_factor": scale}


def _unique(name: str) -> str:
    """`name`, numbered when one graph uses it again.

    Counted per outermost function, so that a loop body and the function round it never use one name at one time, and so
    that a rank that traces again alone arrives at the names the others use.
    """
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and _is_function(graph.outer_graph):
        graph = graph.outer_graph
    counts = _uses.setdefault(graph, {})
    counts[name] = counts.get(name, 0) + 1
    return name if counts[name] == 1 else f"{name}.again{counts[name] - 1}"


def _is_function(graph: Any) -> bool:
    return hasattr(graph, "outer_graph")  # a tf.Graph has none


def _call(kind: str, communicate: Callable[..., list[tf.Tensor]], name: str, *tensors: tf.Tensor) -> list[tf.Tensor]:
    if not tf.executing_eagerly():
        return communicate(name, *tensors)
    signature = (kind, name, tuple(tensor.dtype.name for tensor in tensors))
    return _compiled(signature, communicate, tuple(t.shape.rank for t in tensors))(*tensors)


_functions: dict[Any, Any] = {}


def _compiled(signature: Any, communicate: Callable[..., list[tf.Tensor]], ranks: tuple[int, ...]) -> Any:
    """One `tf.function` per collective and name: in graphs Horovod honours the name."""
    key = (*signature, ranks)
    if key not in _functions:
        name = signature[1]
        _functions[key] = tf.function(
            functools.partial(communicate, name), reduce_retracing=True, jit_compile=False, autograph=False
        )
    return _functions[key]


def _one_dtype(function: str, tensors: Sequence[tf.Tensor], name: str) -> tf.DType:
    dtypes = sorted({tensor.dtype.name for tensor in tensors})
    if len(dtypes) != 1:
        raise TypeError(f"{function}: '{name}' mixes dtypes {dtypes}; one group carries one dtype.")
    return tensors[0].dtype


def _scaled(tensor: tf.Tensor, scale: float) -> tf.Tensor:
    return tf.identity(tensor) if scale == 1.0 else tensor * tf.cast(scale, tensor.dtype)
