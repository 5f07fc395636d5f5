"""The loss scale of a manager in variables, and gradients divided by it. No communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdvars import scaling, sparse
from hvdvars.types import Gradient


@dataclass(frozen=True)
class Kept:
    """The state of an automatic loss scale, as variables: a float32 scalar and an int64 scalar."""

    scale: tf.Variable
    good_steps: tf.Variable


def create(scale: float) -> Kept:
    """The state before the first step. Local. Raises ValueError unless `scale` is finite and more than 0."""
    first = scaling.init(scale)
    with tf.init_scope():
        return Kept(
            tf.Variable(first.scale, dtype=tf.float32, trainable=False, name="loss_scale"),
            tf.Variable(first.good_steps, dtype=tf.int64, trainable=False, name="loss_scale_normal_steps"),
        )


def advance(kept: Kept, finite: tf.Tensor, every_n: int | None, counts: tf.Tensor | None = None) -> None:
    """Take in whether a step's gradients were finite; a step that does not count (a bool scalar) changes nothing.

    Local; `finite` must be equal on all ranks that are to keep one scale.
    """
    before = scaling.LossScale(kept.scale.read_value(), kept.good_steps.read_value())
    after = scaling.update(before, finite, every_n)
    for variable, old, new in zip((kept.scale, kept.good_steps), before, after, strict=True):
        variable.assign(new if counts is None else tf.where(counts, new, old))


def unscale(gradients: Sequence[Gradient], scale: Any) -> list[Gradient]:
    """The gradients divided by `scale`, a float or a float32 scalar, in their own dtypes; integers stay. Local."""
    if not tf.is_tensor(scale) and not isinstance(scale, tf.Variable) and scale == 1.0:
        return list(gradients)
    return [sparse.map_values(lambda values: _divided(values, scale), gradient) for gradient in gradients]


def _divided(values: tf.Tensor, scale: Any) -> tf.Tensor:
    if not (values.dtype.is_floating or values.dtype.is_complex):
        return values
    # The inverse of a large scale is too small a number for float16.
    wide = tf.float32 if values.dtype.size == 2 else values.dtype
    return tf.cast(tf.cast(values, wide) / tf.cast(scale, wide), values.dtype)
