"""Algorithms of an all-reduce spec, and ways to an owner, in terms of collectives on flat buffers.

Every function sums a flat buffer over all ranks; `scale` multiplies the sum (1 / ranks for a mean).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from hvdvars import check, collectives
from hvdvars.placement import split_evenly
from hvdvars.session import Group, everyone, world

WAYS = ("all_to_all", "reduce_scatter", "all_reduce")
"""The ways that gradients reach their owner."""


def all_reduce(buffer: tf.Tensor, name: str, scale: float, alg: str, shards: int) -> tf.Tensor:
    """The summed buffer, the same on every rank. Collective: every rank of the group calls it in the same order.

    `alg` is `xring`, `nccl` or `collective` (one ring each on 1/`shards` of the buffer), or `pscpu`/`psgpu`: the
    buffer in `shards` pieces, owned round robin, moved to their owners, summed there and gathered; `pscpu` on the CPU,
    `psgpu` where the buffer is.
    """
    if alg in ("pscpu", "psgpu"):
        with device_of(alg):
            return shuffle(buffer, name, scale, shards, everyone())
    if shards == 1:
        return collectives.all_reduce(buffer, name, scale)
    pieces = tf.split(buffer, list(split_evenly(check.length_of(buffer), shards)))
    used = [piece for piece in pieces if check.length_of(piece)]
    if alg == "collective":
        return tf.concat(collectives.all_reduce_group(used, name, scale), 0)
    return tf.concat([collectives.all_reduce(piece, f"{name}.{k}", scale) for k, piece in enumerate(used)], 0)


def count(alg: str, shards: int, elements: int) -> int:
    """How many collectives `all_reduce` makes of a buffer of so many elements. Local."""
    if world().size == 1:
        return 0
    if alg in ("pscpu", "psgpu"):
        return 2
    return 1 if alg == "collective" else min(shards, elements)


def device_of(alg: str) -> AbstractContextManager[Any]:
    """The scope of TensorFlow devices in which an algorithm works: `pscpu` sums up on the CPU. Local."""
    # Not tf.device(None), which would undo the scopes around it.
    return tf.device("/CPU:0") if alg == "pscpu" else nullcontext()


def shuffle(
    buffer: tf.Tensor,
    name: str,
    scale: float,
    shards: int,
    group: Group,
    between: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
) -> tf.Tensor:
    """The flat buffer summed over the group, in pieces 0 to `shards` - 1 that belong to its ranks round robin.

    `between` is given this rank's pieces of the sum times `scale`, as one flat tensor, and returns what is gathered in
    their place. Collective: every rank of the group calls it in the same order.
    """
    if group.size == 1:
        return between(collectives.all_reduce(buffer, name, scale, group))
    pieces = tf.split(buffer, list(split_evenly(check.length_of(buffer), shards)))
    order = sorted(range(shards), key=lambda k: (k % group.size, k))
    counts = [0] * group.size
    for k, piece in enumerate(pieces):
        counts[k % group.size] += check.length_of(piece)
    moved = pieces[0] if shards == 1 else tf.concat([pieces[k] for k in order], 0)
    mine = between(_move_and_sum(moved, counts, name, scale, group))
    whole = gather_parts(mine, counts, name, group)
    if shards <= group.size:
        return whole
    back = tf.split(whole, [check.length_of(pieces[k]) for k in order])
    return tf.concat([back[order.index(k)] for k in range(shards)], 0)


def _move_and_sum(
    buffer: tf.Tensor, parts: Sequence[int], name: str, scale: float, group: Group, wide: bool = False
) -> tf.Tensor:
    received = collectives.all_to_all(buffer, parts, f"{name}.shards", group)
    return _sum(tf.split(received, [parts[group.place]] * group.size), scale, wide)


def reduce_parts(
    buffer: tf.Tensor, parts: Sequence[int], name: str, scale: float, way: str, wide: bool = False
) -> tf.Tensor:
    """This rank's part of the summed buffer: `parts[r]` elements belong to rank r, in rank order.

    With `wide`, a sum of float16 or bfloat16 comes as float32; with an all-to-all it has not been rounded before.
    Collective: every rank of the group calls it in the same order. `way` is one of `WAYS`: exact uneven pieces and a
    local sum; a reduce-scatter of parts padded to the largest; or an all-reduce of which the rest is dropped.
    """
    rank, ranks = world().rank, world().size
    if ranks > 1 and way == "all_to_all":
        return _move_and_sum(buffer, parts, name, scale, everyone(), wide)
    if ranks == 1 or way == "all_reduce":
        start = sum(parts[:rank])
        part = collectives.all_reduce(buffer, name, scale)
        part = part if ranks == 1 else part[start : start + parts[rank]]
    else:
        largest = max(parts)
        padded = [tf.pad(piece, [[0, largest - check.length_of(piece)]]) for piece in tf.split(buffer, list(parts))]
        part = collectives.reduce_scatter(tf.concat(padded, 0), name, scale)[: parts[rank]]
    return tf.cast(part, _wide(part.dtype)) if wide else part


def _sum(parts: Sequence[tf.Tensor], scale: float, wide: bool = False) -> tf.Tensor:
    dtype = parts[0].dtype
    # Half precision would round after each addend.
    added = _wide(dtype)
    total = tf.cast(parts[0], added)
    for part in parts[1:]:
        total += tf.cast(part, added)
    total = total if scale == 1.0 else total * tf.cast(scale, added)
    return total if wide else tf.cast(total, dtype)


def _wide(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def gather_parts(part: tf.Tensor, parts: Sequence[int], name: str, group: Group | None = None) -> tf.Tensor:
    """The whole buffer on every rank of `group` (None: all), from each rank's part of `parts[rank]` elements.

    Collective: every rank of the group calls it in the same order.
    """
    return tf.ensure_shape(collectives.all_gather(part, f"{name}.whole", group), [sum(parts)])
