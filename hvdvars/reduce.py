"""Gradients in, reduced gradients out: the one path that every mode takes.

`compact → pack → algorithm → unpack → uncompact`, with sparse gradients beside it. What is sent, in how many
collectives and under which names is decided once, in a `Reduction`, from values that all ranks have compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import tensorflow as tf

from hvdvars import collectives, fusion, hierarchy, sparse, spec
from hvdvars.options import Options
from hvdvars.session import world
from hvdvars.types import Gradient

# A table of unknown density is sent sparse above this size: its dense form would be mostly zeros.
_DENSE_BYTES = 1 << 20


@dataclass(frozen=True)
class Form:
    """How one gradient crosses the wire: `kind` is `dense`, `sparse` or `none`; shape and dtype are its variable's."""

    kind: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes of the variable."""
        return tf.TensorShape(self.shape).num_elements() * tf.as_dtype(self.dtype).size


@dataclass(frozen=True)
class Reduction:
    """One way of reducing one list of gradients; `dense` are the indices that the fusion plan covers, in its order.

    `ranges` are those of the spec, and `range_of` says for each bucket of the plan to which of them it belongs.
    """

    name: str
    forms: tuple[Form, ...]
    dense: tuple[int, ...]
    plan: fusion.Plan
    scale: float
    ranges: tuple[spec.Range, ...]
    range_of: tuple[int, ...]
    compact: bool

    @property
    def collectives(self) -> int:
        """Collectives per step."""
        sent = sum(self._collectives(bucket, index) for bucket, index in self._buckets())
        return sent + 2 * sum(form.kind == "sparse" for form in self.forms)

    def report_ranges(self) -> list[dict[str, Any]]:
        """What each range of the spec carries per step, as JSON-able values. Local."""
        rows = []
        for number, part in enumerate(self.ranges):
            buckets = [bucket for bucket, index in self._buckets() if index == number]
            rows.append(
                {
                    "alg": part.alg,
                    "runs_as": hierarchy.runs_as(part.alg),
                    "shards": part.shards,
                    "limit": part.limit,
                    "tensors": sum(len(bucket.places) for bucket in buckets),
                    "bytes": sum(bucket.bytes for bucket in buckets) if world().size > 1 else 0,
                    "collectives": sum(self._collectives(bucket, number) for bucket in buckets),
                }
            )
        return rows

    def _buckets(self) -> Iterator[tuple[fusion.Bucket, int]]:
        return zip(self.plan.buckets, self.range_of, strict=True)

    def _collectives(self, bucket: fusion.Bucket, index: int) -> int:
        if bucket.kind == "group":
            return int(world().size > 1)
        return hierarchy.count(self.ranges[index].alg, self.ranges[index].shards, bucket.size)


def choose_form(kinds: Sequence[str], rows: Sequence[int | None], form: Form, option: str, index_bytes: int) -> str:
    """`dense`, `sparse` or `none` for one gradient, the same on every rank.

    `kinds` and `rows` are each rank's: how its gradient came (`dense`, `sparse`, `none`), and its rows where known.
    `option` is the manager's `sparse`. Local.
    """
    present = [kind for kind in kinds if kind != "none"]
    if not present:
        return "none"
    if option == "dense" or any(kind == "dense" for kind in kinds) or "none" in kinds:
        return "dense"
    if option == "sparse":
        return "sparse"
    known = [count for count in rows if count is not None]
    if len(known) < len(rows):
        return "sparse" if form.bytes > _DENSE_BYTES else "dense"
    row_bytes = form.bytes // max(1, form.shape[0])
    return sparse.choose(max(known), row_bytes, index_bytes, form.bytes, len(kinds))


def plan_reduction(name: str, forms: Sequence[Form], options: Options) -> Reduction:
    """Decide how gradients of these forms are all-reduced under these options. Local."""
    dense = tuple(i for i, form in enumerate(forms) if form.kind == "dense")
    ranges = spec.parse(options.all_reduce_spec) if options.all_reduce_spec else (spec.Range("xring"),)
    if options.gradient_repacking:
        ranges = tuple(replace(part, shards=options.gradient_repacking) for part in ranges)
    compact = options.compact_gradient_transfer
    dtypes = ["float16" if compact and forms[i].dtype == "float32" else forms[i].dtype for i in dense]
    plan, range_of = _plan_ranges([forms[i].shape for i in dense], dtypes, ranges, options)
    return Reduction(
        name=name,
        forms=tuple(forms),
        dense=dense,
        plan=plan,
        scale=1.0 / world().size if options.average else 1.0,
        ranges=ranges,
        range_of=range_of,
        compact=compact,
    )


def _plan_ranges(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], ranges: Sequence[spec.Range], options: Options
) -> tuple[fusion.Plan, tuple[int, ...]]:
    """Buckets that hold tensors of one range each, range after range; and the range of each bucket."""
    chosen = [spec.select(ranges, prod(shape)) for shape in shapes]
    parts: list[tuple[fusion.Plan, list[int]]] = []
    range_of: list[int] = []
    for number in range(len(ranges)):
        here = [i for i, index in enumerate(chosen) if index == number]
        part = _plan_buckets([shapes[i] for i in here], [dtypes[i] for i in here], options)
        parts.append((part, here))
        range_of += [number] * len(part.buckets)
    return fusion.join(parts), tuple(range_of)


def _plan_buckets(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], options: Options) -> fusion.Plan:
    if options.gradient_repacking:
        return fusion.plan(shapes, dtypes, small_bytes=None, max_bytes=None)
    if options.allreduce_merge_scope:
        size = options.allreduce_merge_scope
        return fusion.plan(shapes, dtypes, kind="group", small_bytes=None, max_bytes=None, max_group=size)
    if options.agg_small_grads_max_bytes:
        small, most = options.agg_small_grads_max_bytes, options.agg_small_grads_max_group
        return fusion.plan(shapes, dtypes, small_bytes=small, max_bytes=None, max_group=most)
    if options.fusion == "pack":
        return fusion.plan(shapes, dtypes, small_bytes=None)
    if options.fusion == "group":
        return fusion.plan(shapes, dtypes, kind="group", small_bytes=None, max_bytes=None)
    if options.fusion == "none":
        return fusion.plan(shapes, dtypes, small_bytes=-1)
    return fusion.plan(shapes, dtypes)


def reduce_gradients(reduction: Reduction, gradients: Sequence[Gradient]) -> list[Gradient]:
    """The reduced gradients on every rank, in the order of `gradients`: tensors, IndexedSlices, or None.

    Collective: every rank of the group calls it in the same order, in a graph.
    """
    results: list[Gradient] = [None] * len(gradients)
    for index, form in enumerate(reduction.forms):
        if form.kind == "sparse":
            results[index] = reduce_slices(f"{reduction.name}.sparse{index}", gradients[index], form, reduction.scale)
    tensors = as_tensors(reduction.forms, reduction.dense, gradients)
    for index, tensor in zip(reduction.dense, _reduce_tensors(reduction, tensors), strict=True):
        results[index] = tensor
    return results


def _reduce_tensors(reduction: Reduction, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    half = [reduction.compact and tensor.dtype in (tf.float32, tf.float16) for tensor in tensors]
    # Divided before they are added, float16 sums stay within the range of the addends.
    before = 1.0 / world().size
    tensors = [tf.cast(t * before, tf.float16) if small else t for t, small in zip(tensors, half, strict=True)]
    packed = fusion.pack(reduction.plan, tensors)
    buffers = [_reduce_bucket(reduction, number, buffer) for number, buffer in enumerate(packed)]
    reduced = fusion.unpack(reduction.plan, buffers)
    after = 1.0 if reduction.scale != 1.0 or world().size == 1 else float(world().size)
    return [
        tf.cast(tensor, reduction.forms[index].dtype) * after if small else tensor
        for index, tensor, small in zip(reduction.dense, reduced, half, strict=True)
    ]


def _reduce_bucket(
    reduction: Reduction, number: int, packed: tf.Tensor | list[tf.Tensor]
) -> tf.Tensor | list[tf.Tensor]:
    bucket, part = reduction.plan.buckets[number], reduction.ranges[reduction.range_of[number]]
    name = f"{reduction.name}.{number}"
    scale = 1.0 if reduction.compact and bucket.dtype == "float16" else reduction.scale
    if bucket.kind == "group":
        return collectives.all_reduce_group(packed, name, scale)
    return hierarchy.all_reduce(packed, name, scale, part.alg, part.shards)


def as_tensors(forms: Sequence[Form], indices: Sequence[int], gradients: Sequence[Gradient]) -> list[tf.Tensor]:
    """The gradients at `indices` as tensors of their variables' shapes: slices summed up, None as zeros. Local."""
    tensors = []
    for index in indices:
        gradient, form = gradients[index], forms[index]
        if gradient is None:
            gradient = tf.zeros(form.shape, form.dtype)
        elif isinstance(gradient, tf.IndexedSlices):
            gradient = sparse.to_dense(gradient, form.shape)
        # Only where needed: a thousand operations that do nothing cost a millisecond.
        tensors.append(gradient if gradient.shape == form.shape else tf.ensure_shape(gradient, form.shape))
    return tensors


def as_planned(reduction: Reduction, gradients: Sequence[Gradient]) -> list[Gradient]:
    """The gradients in the forms that the plan has for them: tensors, IndexedSlices, or None. Local."""
    planned = [
        gradient if form.kind == "sparse" else None for form, gradient in zip(reduction.forms, gradients, strict=True)
    ]
    tensors = as_tensors(reduction.forms, reduction.dense, gradients)
    for index, tensor in zip(reduction.dense, tensors, strict=True):
        planned[index] = tensor
    return planned


def reduce_slices(name: str, slices: tf.IndexedSlices, form: Form, scale: float) -> tf.IndexedSlices:
    """The rows of all ranks, rows with equal index summed, times `scale`; indices are unique and ascend.

    Collective: every rank of the group calls it in the same order. Each rank sums its own rows first, to send fewer.
    """
    own = sparse.sum_rows(slices)
    rows = collectives.all_gather(own.values, f"{name}.rows")
    indices = collectives.all_gather(tf.cast(own.indices, tf.int64), f"{name}.indices")
    summed = sparse.sum_rows(tf.IndexedSlices(rows, indices, tf.constant(form.shape, tf.int64)))
    if scale == 1.0:
        return summed
    return tf.IndexedSlices(summed.values * tf.cast(scale, rows.dtype), summed.indices, summed.dense_shape)
