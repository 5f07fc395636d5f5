"""Tensor fusion: which tensors share a buffer, and the way in and out of it. No communication here.

`plan` decides once; `pack` and `unpack` follow it. A *bucket* is what one collective carries: one large tensor as it
is, or several small ones copied into one flat buffer, or several left as they are in one Horovod group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import tensorflow as tf

SMALL_BYTES = 64 * 1024
"""Tensors up to this many bytes are packed: a collective of their own would cost more than the copies."""

BUCKET_BYTES = 32 * 1024 * 1024
"""A packed buffer is closed when it has this many bytes, so that the first travels while the next is packed."""

# Pieces of a buffer that begin on this boundary are views of it; others have to be copied (TensorFlow's alignment).
_ALIGNMENT = 64


@dataclass(frozen=True)
class Place:
    """Where one tensor is: `index` in the caller's list, `offset` and `size` in elements of its bucket."""

    index: int
    shape: tuple[int, ...]
    size: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """What one collective carries; `kind` is `alone`, `packed` or `group`."""

    kind: str
    dtype: str
    places: tuple[Place, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return sum(place.size for place in self.places)

    @property
    def bytes(self) -> int:
        """Bytes."""
        return self.size * tf.as_dtype(self.dtype).size


@dataclass(frozen=True)
class Plan:
    """Buckets for a list of `count` tensors; `rest` are the indices of tensors without elements, in no bucket."""

    buckets: tuple[Bucket, ...]
    count: int
    rest: tuple[Place, ...]
    rest_dtypes: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.bytes for bucket in self.buckets)


def plan(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[str],
    *,
    kind: str = "packed",
    small_bytes: int | None = SMALL_BYTES,
    max_bytes: int | None = BUCKET_BYTES,
    max_group: int | None = None,
    owners: Sequence[int] | None = None,
) -> Plan:
    """Decide the buckets for tensors of these shapes and dtypes (names such as `float32`). Local.

    Tensors of at most `small_bytes` (None: all) share buckets of one dtype, of at most `max_bytes` and `max_group`
    tensors (None: no limit), in their own order; the others go alone, and so does a small one that has no company.
    With `owners`, each bucket holds the tensors of rank 0 first, then those of rank 1, and so on.

    Raises:
        ValueError: the lists differ in length, or a dimension is unknown.
    """
    if len(shapes) != len(dtypes):
        raise ValueError(f"fusion.plan: got {len(shapes)} shapes and {len(dtypes)} dtypes; give one dtype per shape")
    for index, shape in enumerate(shapes):
        if any(dimension is None for dimension in shape):
            raise ValueError(f"fusion.plan: shapes[{index}] is {tuple(shape)}; every dimension must be known")
    sizes = [prod(shape) for shape in shapes]
    widths = [tf.as_dtype(dtype).size for dtype in dtypes]
    order = sorted(range(len(shapes)), key=lambda i: owners[i]) if owners is not None else range(len(shapes))
    empty = [i for i in range(len(shapes)) if sizes[i] == 0]
    buckets: list[tuple[str, str, list[int]]] = []
    for dtype in sorted(set(dtypes), key=list(dtypes).index):
        here = [i for i in order if dtypes[i] == dtype and sizes[i]]
        small = [i for i in here if small_bytes is None or sizes[i] * widths[i] <= small_bytes]
        limit = None if max_bytes is None else max(1, max_bytes // tf.as_dtype(dtype).size)
        buckets += [("alone", dtype, [i]) for i in here if i not in set(small)]
        buckets += [(kind, dtype, part) for part in _fill(small, sizes, limit, max_group)]
    # In order of their first tensor, last first would overlap more with a backward pass, but not with anything packed.
    buckets.sort(key=lambda bucket: bucket[2][0])
    return Plan(
        buckets=tuple(_bucket(kind, dtype, indices, shapes, sizes) for kind, dtype, indices in buckets),
        count=len(shapes),
        rest=tuple(Place(i, tuple(shapes[i]), 0, 0) for i in empty),
        rest_dtypes=tuple(dtypes[i] for i in empty),
    )


def _fill(indices: Sequence[int], sizes: Sequence[int], limit: int | None, most: int | None) -> list[list[int]]:
    """Consecutive parts of `indices`, each within the limits (one tensor above the limit makes a part of its own)."""
    parts: list[list[int]] = []
    filled = 0
    for index in indices:
        full = not parts or (limit is not None and filled + sizes[index] > limit) or len(parts[-1]) == most
        if full:
            parts.append([])
            filled = 0
        parts[-1].append(index)
        filled += sizes[index]
    return parts


def _bucket(
    kind: str, dtype: str, indices: Sequence[int], shapes: Sequence[Sequence[int]], sizes: Sequence[int]
) -> Bucket:
    places = []
    offset = 0
    for index in indices:
        places.append(Place(index, tuple(shapes[index]), sizes[index], offset))
        offset += sizes[index]
    return Bucket("alone" if len(indices) == 1 else kind, dtype, tuple(places))


def flatten(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """One flat tensor with the elements of all, in order; a single one is not copied. Local."""
    flat = [tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1]) for tensor in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, 0)


def pack(plan: Plan, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor | list[tf.Tensor]]:
    """The buffers of the buckets: a flat tensor each, or the list of its tensors for a group.

    `tensors` are aligned with the lists that `plan` was made from. Local.
    """
    return [
        [tensors[place.index] for place in bucket.places]
        if bucket.kind == "group"
        else flatten([tensors[place.index] for place in bucket.places])
        for bucket in plan.buckets
    ]


def unpack(plan: Plan, buffers: Sequence[tf.Tensor | list[tf.Tensor]]) -> list[tf.Tensor]:
    """The inverse of `pack`: tensors in the caller's order, with their shapes. Local."""
    tensors: list[tf.Tensor | None] = [None] * plan.count
    for bucket, buffer in zip(plan.buckets, buffers, strict=True):
        pieces = buffer if bucket.kind == "group" else cut(buffer, bucket.places)
        for place, piece in zip(bucket.places, pieces, strict=True):
            tensors[place.index] = piece
    for place, dtype in zip(plan.rest, plan.rest_dtypes, strict=True):
        tensors[place.index] = tf.zeros(place.shape, dtype)
    return tensors  # type: ignore[return-value]


def cut(buffer: tf.Tensor, places: Sequence[Place]) -> list[tf.Tensor]:
    """The tensors that lie one after the other in a flat buffer, in the order of `places`. Local."""
    if not places:
        return []
    if len(places) == 1:
        return [_shaped(buffer, places[0].shape)]
    width = buffer.dtype.size
    if all(place.size * width % _ALIGNMENT == 0 for place in places):
        # Rows of one alignment unit: TensorFlow then hands out views of the buffer instead of copies.
        row = _ALIGNMENT // width
        pieces = tf.split(tf.reshape(buffer, [-1, row]), [place.size // row for place in places])
        return [tf.reshape(piece, place.shape) for piece, place in zip(pieces, places, strict=True)]
    pieces = tf.split(buffer, [place.size for place in places])
    return [_shaped(piece, place.shape) for piece, place in zip(pieces, places, strict=True)]


def _shaped(tensor: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    return tf.ensure_shape(tensor, shape) if len(shape) == 1 else tf.reshape(tensor, shape)
