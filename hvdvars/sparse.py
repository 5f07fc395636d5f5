"""`tf.IndexedSlices` as values: rows summed, joined, averaged or made dense, and which form moves fewer bytes.

No communication: everything here is local to the rank. A row is `values[i]`, and belongs to `indices[i]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdvars.types import Gradient

# The ops below would add these in their own precision, and lose bits with each repeated row.
_ADDED_AS = {tf.float16: tf.float32, tf.bfloat16: tf.float32}


def map_values(change: Callable[[tf.Tensor], tf.Tensor], gradient: Gradient) -> Gradient:
    """The gradient with `change` applied to it, if a tensor, or to the rows of slices; None stays None. Local."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return None if gradient is None else change(gradient)


def cast(gradient: Gradient, dtype: tf.DType) -> Gradient:
    """The gradient in another dtype; None stays None. Local."""
    return map_values(lambda values: tf.cast(values, dtype), gradient)


def sum_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sum the rows with equal index, in order of appearance; the result's indices ascend and are unique.

    Works for any numeric dtype and no rows at all. Local.
    """
    found, group = tf.unique(slices.indices, out_idx=tf.int32)
    order = tf.argsort(found)
    place = tf.math.invert_permutation(order)
    rows = _segment_sum(slices.values, tf.gather(place, group), tf.size(found))
    return tf.IndexedSlices(rows, tf.gather(found, order), slices.dense_shape)


def to_dense(slices: tf.IndexedSlices, shape: Any = None) -> tf.Tensor:
    """The tensor of `shape` that holds each row at its index, repeated rows summed, and zeros elsewhere.

    `shape` is a static shape or a vector, and defaults to `slices.dense_shape`. Local.
    Raises ValueError if the number of rows is unknown.
    """
    shape = slices.dense_shape if shape is None else shape
    static = tf.TensorShape(tf.get_static_value(shape, partial=True) if tf.is_tensor(shape) else shape)
    rows = static[0] if static.rank else None
    if rows is None and not tf.is_tensor(shape):
        raise ValueError(
            f"sparse.to_dense: the number of rows is unknown: dense_shape is {slices.dense_shape}, shape is {shape}; "
            "give tf.shape(variable)"
        )
    dense = _segment_sum(slices.values, slices.indices, shape[0] if rows is None else rows)
    dense.set_shape(static)
    return dense


def concat(parts: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """All rows of all parts, in order; indices become int64 where the parts differ. Local.

    Raises ValueError without parts.
    """
    if not parts:
        raise ValueError("sparse.concat: expected at least one tf.IndexedSlices, got none")
    index = parts[0].indices.dtype if len({part.indices.dtype for part in parts}) == 1 else tf.int64
    return tf.IndexedSlices(
        tf.concat([part.values for part in parts], 0),
        tf.concat([tf.cast(part.indices, index) for part in parts], 0),
        next((part.dense_shape for part in parts if part.dense_shape is not None), None),
    )


def average(slices: tf.IndexedSlices, count: Any) -> tf.IndexedSlices:
    """Every row divided by `count` (replicas, or the sum of their weights).

    Local. Raises TypeError for integer rows, whose mean would be rounded.
    """
    dtype = slices.values.dtype
    if not (dtype.is_floating or dtype.is_complex):
        raise TypeError(f"sparse.average: rows of {dtype.name} have no exact mean; use average=False for the sum")
    return tf.IndexedSlices(slices.values / tf.cast(count, dtype), slices.indices, slices.dense_shape)


def choose(rows: int, row_bytes: int, index_bytes: int, dense_bytes: int, world: int) -> str:
    """`sparse` or `dense`: which form of a gradient costs a rank fewer bytes on the wire.

    `rows` is the number of rows of one rank, equal on all ranks so that all choose alike. Sparse gathers every rank's
    rows and indices; dense is a ring all-reduce. One rank moves nothing and keeps its rows. Local.
    Raises ValueError for negative sizes or a world without ranks.
    """
    if world < 1 or min(rows, row_bytes, index_bytes, dense_bytes) < 0:
        raise ValueError(
            f"sparse.choose: expected sizes of at least 0 and a world of at least 1, got rows={rows}, "
            f"row_bytes={row_bytes}, index_bytes={index_bytes}, dense_bytes={dense_bytes}, world={world}"
        )
    gathered = world * rows * (row_bytes + index_bytes)
    # Both sides times world, to stay in integers.
    return "sparse" if world == 1 or gathered * world < 2 * dense_bytes * (world - 1) else "dense"


def _segment_sum(values: tf.Tensor, indices: tf.Tensor, rows: Any) -> tf.Tensor:
    added = tf.cast(values, _ADDED_AS.get(values.dtype, values.dtype))
    return tf.cast(tf.math.unsorted_segment_sum(added, indices, rows), values.dtype)
