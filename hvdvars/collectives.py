"""Horovod's collectives as thin, checked functions with stable names: the only file that imports `horovod.tensorflow`.

Each collective takes a tensor and a `name` that is equal on every rank, and exists once: wire types that Horovod lacks
are converted here, one rank needs no communication, and eager calls run through a cached `tf.function`, because Horovod
ignores the names of eager calls and would add up whatever comes first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdvars import check, graphs, launchenv, session, wire
from hvdvars.session import Group, World, everyone, world

_SAME_SHAPE = ("allreduce", "grouped_allreduce", "broadcast")
"""Operations whose results have the shapes of what they are given."""


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
    return graphs.call(f"all_reduce:{members.number}:{scale}", communicate, name, *tensors)


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
    return graphs.call(f"all_gather:{members.number}", communicate, name, tensor)[0]


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
    return graphs.call(f"broadcast:{root}", communicate, name, tensor)[0]


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
    return graphs.call(f"all_to_all:{members.number}:{tuple(splits)}", communicate, name, tensor)[0]


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
    return graphs.call(f"reduce_scatter:{scale}", communicate, name, tensor)[0]


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
    """One of Horovod's operations in a graph, where it runs once a step on every rank: see `hvdvars.graphs`."""
    # Scopes are ignored so that a rank that traces again keeps the names.
    common = {"name": graphs.unique(name), "ignore_name_scope": True, "process_set_id": group.number if group else 0}
    graphs.take_order(name)
    held = [graphs.hold(tensor) for tensor in tensors]
    several = operation.startswith("grouped_")
    found = getattr(hvd.mpi_ops.MPI_LIB, f"horovod_{operation}")(held if several else held[0], **attributes, **common)
    results = graphs.demand(list(found) if isinstance(found, (list, tuple)) else [found])
    if operation in _SAME_SHAPE:
        for result, tensor in zip(results, tensors, strict=True):
            result.set_shape(tensor.shape)
    return results


def _sum(scale: float) -> dict[str, Any]:
    return {"reduce_op": hvd.Sum, "prescale_factor": 1.0, "postscale_factor": scale}


def _one_dtype(function: str, tensors: Sequence[tf.Tensor], name: str) -> tf.DType:
    dtypes = sorted({tensor.dtype.name for tensor in tensors})
    if len(dtypes) != 1:
        raise TypeError(f"{function}: '{name}' mixes dtypes {dtypes}; one group carries one dtype.")
    return tensors[0].dtype


def _scaled(tensor: tf.Tensor, scale: float) -> tf.Tensor:
    return tf.identity(tensor) if scale == 1.0 else tensor * tf.cast(scale, tensor.dtype)
