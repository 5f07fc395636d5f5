"""Gradients that wait for one step, in variables: state by value, without communication.

What waits are this rank's own gradients, before they are reduced. A step can so start to reduce them at once, beside
its own forward and backward pass, which a collective of that pass's gradients would have to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from hvdvars import check, optimizer
from hvdvars.types import Gradient, Variable


@dataclass(frozen=True)
class Late:
    """The gradients of one step, aligned with their variables until the next step takes them."""

    values: tuple[tf.Variable | None, ...]
    """A tensor of the variable's shape, or rows of any number; None where there is no gradient."""
    indices: tuple[tf.Variable | None, ...]
    """Of rows, which ones."""
    shapes: tuple[tuple[int, ...], ...]
    scale: tf.Variable
    """A float32: what the loss was multiplied by."""
    waiting: tf.Variable
    """A bool: whether the gradients are still to be applied."""


def create(
    kinds: Sequence[str], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], waiting: bool = True
) -> Late:
    """Zeros that wait, one for each gradient of kind `dense`, no rows for `sparse`, and nothing for `none`.

    `shapes` and `dtypes` are the variables'. Without `waiting` there is nothing to apply yet. Local, outside of graphs.
    """
    values: list[tf.Variable | None] = []
    indices: list[tf.Variable | None] = []
    for kind, shape, dtype in zip(kinds, shapes, dtypes, strict=True):
        rows = kind == "sparse"
        first = tf.zeros((0, *shape[1:]) if rows else shape, dtype)
        values.append(None if kind == "none" else _variable(first, (None, *shape[1:]) if rows else shape))
        indices.append(_variable(tf.zeros([0], tf.int64), (None,)) if rows else None)
    flag = tf.Variable(waiting, trainable=False, name="hvdvars_waiting")
    scale = tf.Variable(1.0, dtype=tf.float32, trainable=False, name="hvdvars_late_scale")
    return Late(tuple(values), tuple(indices), tuple(tuple(shape) for shape in shapes), scale, flag)


def refuse(
    optimizer_: object, variables: Sequence[Variable], others: Sequence[Sequence[Variable]], taken: bool = False
) -> None:
    """Refuse what cannot be applied one step late.

    Gradients for the lists `others` wait for the same optimizer; `taken`: those of `variables` wait for another one.
    Local. Raises ValueError.
    """
    if optimizer.scales_loss(optimizer_):
        raise ValueError(
            f"apply_gradients: {type(optimizer_).__name__} would unscale gradients of the step before by the loss "
            "scale of this one. Use variable_consistency='strong'."
        )
    if taken:
        raise ValueError(
            "apply_gradients: gradients of these variables wait for another optimizer. With "
            "variable_consistency='relaxed' use one optimizer for them (a callable is made once, not anew each step); "
            "or use 'strong'."
        )
    mine = {id(optimizer.tf_variable(variable)) for variable in variables}
    shared = [variable for other in others for variable in other if id(optimizer.tf_variable(variable)) in mine]
    if shared:
        raise ValueError(
            f"apply_gradients: gradients of {check.name_of(shared[0])} wait in another list of variables, or with "
            "another pattern of None and IndexedSlices. With variable_consistency='relaxed' pass the same list and "
            "the same kinds of gradients each time; or use 'strong'."
        )


def take(late: Late) -> list[Gradient]:
    """The gradients that were put last: tensors, IndexedSlices, or None. Local."""
    taken: list[Gradient] = []
    for value, index, shape in zip(late.values, late.indices, late.shapes, strict=True):
        if value is None:
            taken.append(None)
        elif index is None:
            taken.append(value.read_value())
        else:
            whole = tf.constant(shape, tf.int64)
            taken.append(tf.IndexedSlices(value.read_value(), index.read_value(), whole))
    return taken


def put(late: Late, gradients: Sequence[Gradient], scale: float | tf.Tensor = 1.0) -> None:
    """Let these gradients wait, of the kinds that `late` was made for. Local; in a graph, after `take`.

    `scale` is what the loss was multiplied by that they are of.
    """
    late.scale.assign(tf.cast(scale, tf.float32))
    for value, index, gradient in zip(late.values, late.indices, gradients, strict=True):
        if value is None or gradient is None:
            continue
        if index is None:
            value.assign(gradient)
        else:
            value.assign(gradient.values)
            index.assign(tf.cast(gradient.indices, tf.int64))
    late.waiting.assign(True)


def drop(late: Late) -> None:
    """Nothing waits any more. Local."""
    late.waiting.assign(False)


def size_of(late: Late) -> int:
    """Bytes of the gradients that wait; 0 where they have been applied. Local."""
    with tf.init_scope():
        if not bool(late.waiting.numpy()):
            return 0
        held = [one for one in (*late.values, *late.indices) if one is not None]
        return sum(int(tf.size(one)) * one.dtype.size for one in held)


def _variable(first: tf.Tensor, shape: Sequence[int | None]) -> tf.Variable:
    return tf.Variable(first, trainable=False, shape=tf.TensorShape(shape), name="hvdvars_late")
