"""Tensor fusion: which tensors share a buffer, and the way in and out of it. No communication here.

`plan` decides once; `pack` and `unpack` follow it. A *bucket* is what one collective carries: one large tensor as it
is, or several small ones copied into one flat buffer, or several left as they are in one Horovod group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import tensorflow as tf

from hvdvars import check

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
    """What one collective carries; `kind` is `alone`, `packed` or `group`.

    `size` counts elements, with the gaps that round each owner's part up to the alignment; `parts` are the elements of
    each owner, in rank order, where the bucket was planned for owners.
    """

    kind: str
    dtype: str
    places: tuple[Place, ...]
    size: int
    parts: tuple[int, ...] = ()

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
) -> Plan:
    """Decide the buckets for tensors of these shapes and dtypes (names such as `float32`). Local.

    Tensors of at most `small_bytes` (None: all) share buckets of one dtype, of at most `max_bytes` and `max_group`
    tensors (None: no limit), filled in the caller's order; the others go alone, and so does one without company.

    Raises:
        ValueError: the lists differ in length, or a dimension is unknown.
    """
    sizes = _sizes(shapes, dtypes)
    buckets: list[Bucket] = []
    for dtype in dict.fromkeys(dtypes):
        width = tf.as_dtype(dtype).size
        here = [i for i in range(len(shapes)) if dtypes[i] == dtype and sizes[i]]
        small = [i for i in here if small_bytes is None or sizes[i] * width <= small_bytes]
        limit = None if max_bytes is None else max(1, max_bytes // width)
        parts = [[i] for i in sorted(set(here) - set(small))] + _fill(small, sizes, limit, max_group)
        buckets += [_bucket("alone" if len(part) == 1 else kind, dtype, [part], shapes, sizes) for part in parts]
    return _plan(sorted(buckets, key=lambda bucket: min(place.index for place in bucket.places)), shapes, dtypes, sizes)


def join(parts: Sequence[tuple[Plan, Sequence[int]]]) -> Plan:
    """One plan of several, each with the indices that its tensors have in the whole list; bucket after bucket. Local.

    Raises:
        ValueError: a plan has not one index per tensor.
    """
    buckets: list[Bucket] = []
    rest: list[Place] = []
    for part, indices in parts:
        if part.count != len(indices):
            raise ValueError(
                f"fusion.join: got {len(indices)} indices for a plan of {part.count} tensors; give one each"
            )
        for bucket in part.buckets:
            buckets.append(replace(bucket, places=tuple(_moved(place, indices) for place in bucket.places)))
        rest += [_moved(place, indices) for place in part.rest]
    dtypes = tuple(dtype for part, _ in parts for dtype in part.rest_dtypes)
    return Plan(tuple(buckets), sum(part.count for part, _ in parts), tuple(rest), dtypes)


def _moved(place: Place, indices: Sequence[int]) -> Place:
    return replace(place, index=indices[place.index])


def plan_owned(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[str], owners: Sequence[int], ranks: int, *, together: bool = True
) -> Plan:
    """Buckets in which each owner's tensors lie side by side, rank 0's first: `parts` are their elements. Local.

    One bucket per dtype, or one per tensor unless `together`. `owners` has one rank per tensor.

    Raises:
        ValueError: the lists differ in length, or a dimension is unknown.
    """
    sizes = _sizes(shapes, dtypes)
    buckets = []
    for dtype in dict.fromkeys(dtypes):
        here = [i for i in range(len(shapes)) if dtypes[i] == dtype and sizes[i]]
        for group in [here] if together else [[i] for i in here]:
            if group:
                owned = [[i for i in group if owners[i] == rank] for rank in range(ranks)]
                kind = "alone" if len(group) == 1 else "packed"
                buckets.append(_bucket(kind, dtype, owned, shapes, sizes))
    return _plan(buckets, shapes, dtypes, sizes)


def _sizes(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> list[int]:
    if len(shapes) != len(dtypes):
        raise ValueError(f"fusion.plan: got {len(shapes)} shapes and {len(dtypes)} dtypes; give one dtype per shape")
    for index, shape in enumerate(shapes):
        if any(dimension is None for dimension in shape):
            raise ValueError(f"fusion.plan: shapes[{index}] is {tuple(shape)}; every dimension must be known")
    return [prod(shape) for shape in shapes]


def _plan(
    buckets: Sequence[Bucket], shapes: Sequence[Sequence[int]], dtypes: Sequence[str], sizes: Sequence[int]
) -> Plan:
    empty = [i for i in range(len(shapes)) if not sizes[i]]
    rest = tuple(Place(i, tuple(shapes[i]), 0, 0) for i in empty)
    return Plan(tuple(buckets), len(shapes), rest, tuple(dtypes[i] for i in empty))


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
    kind: str,
    dtype: str,
    sections: Sequence[Sequence[int]],
    shapes: Sequence[Sequence[int]],
    sizes: Sequence[int],
) -> Bucket:
    """Lay out the sections one after the other; in each, what fills whole alignment units comes first."""
    row = _row(dtype)
    places: list[Place] = []
    parts = []
    end = 0
    for section in sections:
        start = end
        for index in sorted(section, key=lambda i: (sizes[i] % row != 0, i)):
            places.append(Place(index, tuple(shapes[index]), sizes[index], end))
            end += sizes[index]
        if len(sections) > 1 and kind != "alone":
            end = -(-end // row) * row  # the next owner's part begins on the boundary, and stays a view
        parts.append(end - start)
    return Bucket(kind, dtype, tuple(places), end, tuple(parts) if len(sections) > 1 else ())


def _row(dtype: str) -> int:
    return max(1, _ALIGNMENT // tf.as_dtype(dtype).size)


def pack(plan: Plan, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor | list[tf.Tensor]]:
    """The buffers of the buckets: a flat tensor each, or the list of its tensors for a group.

    `tensors` are aligned with the lists that `plan` was made from. Local.
    """
    return [
        [tensors[place.index] for place in bucket.places] if bucket.kind == "group" else fill(bucket, tensors)
        for bucket in plan.buckets
    ]


def fill(
    bucket: Bucket, tensors: Sequence[tf.Tensor] | Mapping[int, tf.Tensor], start: int = 0, stop: int | None = None
) -> tf.Tensor:
    """Elements `start` to `stop` of the bucket's flat buffer; a whole tensor alone is not copied. Local.

    `tensors` is the caller's whole list, or a mapping from index to tensor of those that lie in the range.
    """
    stop = bucket.size if stop is None else stop
    pieces = []
    end = start
    for place in bucket.places:
        low, high = max(start, place.offset), min(stop, place.offset + place.size)
        if low >= high:
            continue
        if low > end:
            pieces.append(tf.zeros([low - end], bucket.dtype))
        tensor = tensors[place.index]
        flat = tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1])
        whole = high - low == place.size
        pieces.append(flat if whole else flat[low - place.offset : high - place.offset])
        end = high
    if stop > end:
        pieces.append(tf.zeros([stop - end], bucket.dtype))
    if not pieces:
        return tf.zeros([0], bucket.dtype)
    return pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0)


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


def cut(buffer: tf.Tensor, places: Sequence[Place], start: int = 0) -> list[tf.Tensor]:
    """The tensors at `places` of a buffer whose first element is at offset `start`; in the order of `places`. Local.

    Pieces that begin and end on the alignment are views of the buffer, not copies.
    """
    if not places:
        return []
    if len(places) == 1 and places[0].size == check.length_of(buffer):
        return [_shaped(buffer, places[0].shape)]
    row = _row(buffer.dtype.name)
    blocks = _blocks(places, start, check.length_of(buffer), row)
    head = [block for block in blocks if block[0] % row == 0]
    whole = sum(size for size, _ in head)
    start_of_buffer = buffer if whole == check.length_of(buffer) else buffer[:whole]
    pieces = tf.split(start_of_buffer, [size for size, _ in head]) if head else []
    tensors: dict[int, tf.Tensor] = {}
    for (_, inside), piece in zip(head, pieces, strict=True):
        tensors.update(_cut_block(piece, inside))
    for size, inside in blocks[len(head) :]:
        tensors.update(_cut_block(tf.ensure_shape(buffer[-size:], [size]), inside))
    return [tensors[place.index] for place in places]


def _blocks(places: Sequence[Place], start: int, length: int, row: int) -> list[tuple[int, list[Place]]]:
    """Consecutive stretches of the buffer: (elements, places inside), each as short as the alignment allows.

    All but the last have a multiple of `row` elements.
    """
    blocks: list[tuple[int, list[Place]]] = []
    begin, inside = start, []  # type: ignore[var-annotated]
    for number, place in enumerate(places):
        inside.append(place)
        following = places[number + 1].offset if number + 1 < len(places) else start + length
        if (following - begin) % row == 0:
            blocks.append((following - begin, inside))
            begin, inside = following, []
    if inside:
        blocks.append((start + length - begin, inside))
    return blocks


def _cut_block(block: tf.Tensor, places: Sequence[Place]) -> dict[int, tf.Tensor]:
    sizes = [place.size for place in places]
    gap = check.length_of(block) - sum(sizes)
    if len(places) == 1 and not gap:
        return {places[0].index: _shaped(block, places[0].shape)}
    pieces = tf.split(block, [*sizes, gap] if gap else sizes)
    return {place.index: _shaped(piece, place.shape) for place, piece in zip(places, pieces, strict=False)}


def _shaped(tensor: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    return tensor if tensor.shape == shape else tf.reshape(tensor, shape)
