"""Owner modes: gradients to their owners, slots and updates there only, values back to everybody.

Whole variables have one owner each, or every flat buffer is cut evenly among all ranks. Both are a fusion plan whose
buckets say how many elements belong to each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdvars import algorithms, collectives, fusion, optimizer, placement, reduce, sparse
from hvdvars.options import Options
from hvdvars.reduce import Form
from hvdvars.session import world
from hvdvars.types import Gradient, Variable


@dataclass(frozen=True)
class Ownership:
    """Who owns what of one list of variables, and how it travels.

    `gradients` covers the variables at `dense`; `values` those at `updated`. With `placement="elements"` they are the
    same plan, and `owners` is empty.
    """

    name: str
    forms: tuple[Form, ...]
    placement: str
    owners: tuple[int, ...]
    dense: tuple[int, ...]
    gradients: fusion.Plan
    updated: tuple[int, ...]
    values: fusion.Plan
    scale: float
    way: str

    @property
    def collectives(self) -> int:
        """Collectives per step."""
        sparse = sum(form.kind == "sparse" for form in self.forms)
        return len(self.gradients.buckets) + 2 * sparse + len(self.values.buckets)

    @property
    def owned_bytes(self) -> tuple[int, ...]:
        """Bytes of variables that each rank owns."""
        ranks = world().size
        if self.owners:
            return placement.balance(
                [self.owners[i] for i in self.updated], [self.forms[i].bytes for i in self.updated], ranks
            )
        loads = [0] * ranks
        for bucket in self.values.buckets:
            for rank, part in enumerate(parts_of(bucket)):
                loads[rank] += part * tf.as_dtype(bucket.dtype).size
        return tuple(loads)


def plan_ownership(
    name: str, forms: Sequence[Form], options: Options, owners: Sequence[int] | None = None
) -> Ownership:
    """Decide owners (unless given) and buckets for variables of these forms. Local, and equal on every rank."""
    ranks = world().size
    scale = 1.0 / ranks if options.average else 1.0
    way = "all_to_all" if options.reduce_to_owner == "auto" else options.reduce_to_owner
    updated = tuple(i for i, form in enumerate(forms) if form.kind != "none")
    together = options.fusion != "none"
    if options.placement == "elements":
        forms = tuple(Form("dense" if form.kind == "sparse" else form.kind, form.shape, form.dtype) for form in forms)
        plan = fusion.plan(
            [forms[i].shape for i in updated], [forms[i].dtype for i in updated], small_bytes=None if together else -1
        )
        return Ownership(name, forms, "elements", (), updated, plan, updated, plan, scale, way)
    owners = tuple(placement.place([form.bytes for form in forms], ranks) if owners is None else owners)
    dense = tuple(i for i in updated if forms[i].kind == "dense")

    def plan_for(indices: Sequence[int], dtypes: Sequence[str]) -> fusion.Plan:
        shapes = [forms[i].shape for i in indices]
        return fusion.plan_owned(
            shapes, [dtypes[i] for i in indices], [owners[i] for i in indices], ranks, together=together
        )

    own = [form.dtype for form in forms]
    gradients = plan_for(dense, own)
    values = plan_for(updated, [published_as(dtype, options.copy_dtype) for dtype in own])
    return Ownership(name, tuple(forms), "variables", owners, dense, gradients, updated, values, scale, way)


def published_as(dtype: str, copy_dtype: str) -> str:
    """The dtype in which the values of variables of `dtype` are published. Local."""
    return copy_dtype if copy_dtype and dtype == "float32" else dtype


def parts_of(bucket: fusion.Bucket) -> tuple[int, ...]:
    """Elements of the bucket that each rank owns. Local."""
    return bucket.parts or placement.split_evenly(bucket.size, world().size)


def _range_of(bucket: fusion.Bucket) -> tuple[int, int]:
    parts, rank = parts_of(bucket), world().rank
    return sum(parts[:rank]), sum(parts[: rank + 1])


def owned_variables(ownership: Ownership, variables: Sequence[Variable]) -> list[Variable]:
    """The whole variables that this rank owns, in the caller's order, with or without a gradient now. Local."""
    if ownership.placement == "elements":
        return []
    rank = world().rank
    return [variable for variable, one in zip(variables, ownership.owners, strict=True) if one == rank]


def create_shards(ownership: Ownership) -> list[tf.Variable]:
    """This rank's piece of each bucket, as flat variables that the optimizer can hold slots for. Local."""
    shards = []
    for number, bucket in enumerate(ownership.values.buckets):
        start, stop = _range_of(bucket)
        initial = tf.zeros([stop - start], bucket.dtype)
        shards.append(tf.Variable(initial, trainable=True, name=f"{ownership.name}/shard{number}".replace(".", "_")))
    return shards


def refuse_optimizer(optimizer_: Any, variables: Sequence[Variable], placement: str) -> None:
    """Refuse an optimizer that needs more than an owner has: all gradients, or variables that are not cut.

    Local. Raises ValueError.
    """
    if optimizer.scales_loss(optimizer_):
        raise ValueError(
            f"apply_gradients: {type(optimizer_).__name__} skips a step by the gradients it is given, and each "
            "owner would decide for its own part alone. Use create('horovod')."
        )
    if optimizer.global_clipnorm(optimizer_) is not None and getattr(optimizer_, "gradient_accumulation_steps", None):
        raise ValueError(
            "apply_gradients: global_clipnorm and gradient_accumulation_steps together clip the accumulated "
            "gradients, of which each owner sees a part. Use create('horovod')."
        )
    if placement == "variables":
        return
    if optimizer.is_elementwise(optimizer_) is False:
        raise ValueError(
            f"apply_gradients: {type(optimizer_).__name__} looks at whole variables (norms, names or layers), "
            "so they cannot be cut. Use placement='variables'."
        )
    if any(getattr(variable, "constraint", None) is not None for variable in variables):
        raise ValueError("apply_gradients: a variable with a constraint has to stay whole. Use placement='variables'.")


def reduce_to_owners(ownership: Ownership, gradients: Sequence[Gradient], wide: bool = False) -> list[Gradient]:
    """The reduced gradients that this rank applies: of its shards, or aligned with `owned_variables` (None stays None).

    With `wide`, sums of float16 and bfloat16 come as float32, as the owner has added them up.
    Collective: every rank of the group calls it in the same order, in a graph.
    """
    tensors = reduce.as_tensors(ownership.forms, ownership.dense, gradients)
    parts = []
    for number, bucket in enumerate(ownership.gradients.buckets):
        buffer = fusion.fill(bucket, tensors)
        name = f"{ownership.name}.{number}"
        parts.append(algorithms.reduce_parts(buffer, parts_of(bucket), name, ownership.scale, ownership.way, wide))
    if ownership.placement == "elements":
        return parts
    found: dict[int, Gradient] = {}
    for bucket, part in zip(ownership.gradients.buckets, parts, strict=True):
        start, stop = _range_of(bucket)
        places = [place for place in bucket.places if start <= place.offset < stop]
        for place, tensor in zip(places, fusion.cut(part, places, start), strict=True):
            found[ownership.dense[place.index]] = tensor
    for place, dtype in zip(ownership.gradients.rest, ownership.gradients.rest_dtypes, strict=True):
        found[ownership.dense[place.index]] = tf.zeros(place.shape, dtype)
    for index, form in enumerate(ownership.forms):
        if form.kind == "sparse":
            name = f"{ownership.name}.sparse{index}"
            found[index] = reduce.reduce_slices(name, gradients[index], form, ownership.scale)
    rank = world().rank
    return [found.get(index) for index, one in enumerate(ownership.owners) if one == rank]


def fill_shards(ownership: Ownership, shards: Sequence[tf.Variable], variables: Sequence[Variable]) -> None:
    """Take this rank's pieces of the variables' values into its shards, on which gradients are applied. Local.

    The values come from the variables each time, so that whatever changed them (a restore, an assignment) counts.
    """
    for bucket, shard in zip(ownership.values.buckets, shards, strict=True):
        shard.assign(_own_values(ownership, bucket, variables))


def publish(ownership: Ownership, variables: Sequence[Variable], shards: Sequence[tf.Variable]) -> None:
    """Give every rank the owners' values.

    Collective: every rank of the group calls it in the same order, in a graph, after the updates.
    """
    rank = world().rank
    for index, value in gather_values(ownership, variables, shards):
        if shards or ownership.owners[index] != rank:
            variables[index].assign(value)


def gather_values(
    ownership: Ownership, values: Sequence[Any], shards: Sequence[tf.Variable] = ()
) -> Iterator[tuple[int, tf.Tensor]]:
    """Pairs of index and value, the owner's, of all variables that are updated.

    `values` are this rank's, variables or tensors, aligned with the variables, and cast to what is published; `shards`
    take their place where given.
    Collective: every rank of the group goes through all of it, in the same order, in a graph.
    """
    for number, bucket in enumerate(ownership.values.buckets):
        part = shards[number].read_value() if shards else _own_values(ownership, bucket, values)
        whole = algorithms.gather_parts(part, parts_of(bucket), f"{ownership.name}.{number}")
        for place, value in zip(bucket.places, fusion.cut(whole, bucket.places), strict=True):
            yield ownership.updated[place.index], value


def keep_owners(known: dict[int, tuple[int, int]], variables: Sequence[Variable], forms: Sequence[Form]) -> list[int]:
    """The owner of each variable: who had it before, in whatever list, since its slots are there; new ones are placed.

    `known` holds owner and bytes by the id of the `tf.Variable`, and is filled up. Local, and equal on every rank.
    """
    loads = [0] * world().size
    for one, size in known.values():
        loads[one] += size
    keys = [id(optimizer.tf_variable(variable)) for variable in variables]
    fresh = [index for index, key in enumerate(keys) if key not in known]
    placed = placement.place([forms[index].bytes for index in fresh], world().size, loads)
    for index, one in zip(fresh, placed, strict=True):
        known[keys[index]] = (one, forms[index].bytes)
    return [known[key][0] for key in keys]


def _own_values(ownership: Ownership, bucket: fusion.Bucket, variables: Sequence[Variable]) -> tf.Tensor:
    """This rank's part of the bucket, from the variables' current values, in the bucket's dtype."""
    start, stop = _range_of(bucket)
    inside = [place for place in bucket.places if place.offset < stop and place.offset + place.size > start]
    here = {place.index: optimizer.tf_variable(variables[ownership.updated[place.index]]) for place in inside}
    # Read first: a cast to its own dtype gives a variable back as it is.
    values = {index: tf.cast(tf.convert_to_tensor(value), bucket.dtype) for index, value in here.items()}
    return fusion.fill(bucket, values, start, stop)


def clip_to_global_norm(name: str, gradients: Sequence[Gradient], norm: float) -> list[Gradient]:
    """Scale this rank's part of the gradients so that the norm of all parts together is at most `norm`.

    Collective: every rank of the group calls it in the same order, in a graph.
    """
    present = [g for g in gradients if g is not None]
    squares = [tf.reduce_sum(tf.square(tf.cast(tf.abs(_values(g)), tf.float64))) for g in present]
    total = collectives.all_reduce(tf.add_n(squares) if squares else tf.zeros([], tf.float64), f"{name}.norm")
    ratio = norm / tf.maximum(tf.sqrt(total), tf.constant(norm, tf.float64))
    return [sparse.map_values(lambda values: values * tf.cast(ratio, values.dtype), g) for g in gradients]


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
