"""The loss scale as state by value: it halves when a gradient is not finite and doubles after enough normal steps.

`update` takes the state and gives the next one, for Python numbers and for tensors alike, so that the caller decides
where the state lives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf

# A float32 beyond these is infinite or 0, from which no halving or doubling leads back.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127


class LossScale(NamedTuple):
    """The scale that the loss is multiplied by, and the normal steps counted since it last changed."""

    scale: Any
    """A float, or a floating scalar tensor."""
    good_steps: Any
    """An int, or an integer scalar tensor."""


def init(scale: float) -> LossScale:
    """The state before the first step. Local. Raises ValueError unless `scale` is finite and more than 0."""
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scaling.init: the loss scale must be finite and more than 0, got {scale!r}")
    return LossScale(float(scale), 0)


def update(state: LossScale, finite: Any, every_n: int | None) -> LossScale:
    """The state after a step whose gradients were all `finite` (a bool or a bool scalar tensor), or not.

    Not finite: half the scale, and no normal steps. Finite: one normal step more; once `every_n` of them are counted,
    the next one doubles the scale and starts the count again. `every_n=None` never doubles. The scale stays
    between 2**-126 and 2**127, which a float32 can hold.
    `finite` must be equal on all ranks. Local. Raises ValueError for `every_n` below 1.
    """
    if every_n is not None and every_n < 1:
        raise ValueError(f"scaling.update: every_n must be at least 1 or None, got {every_n!r}")
    scale, good_steps = state
    if not any(tf.is_tensor(part) for part in (scale, good_steps, finite)):
        if not finite:
            return LossScale(max(scale / 2, _SMALLEST), 0)
        full = every_n is not None and good_steps >= every_n
        return LossScale(min(scale * 2, _LARGEST), 0) if full else LossScale(scale, good_steps + 1)
    scale, good_steps = tf.convert_to_tensor(scale), tf.convert_to_tensor(good_steps)
    full = tf.constant(False) if every_n is None else good_steps >= tf.cast(every_n, good_steps.dtype)
    return LossScale(
        tf.where(finite, tf.where(full, tf.minimum(scale * 2, _LARGEST), scale), tf.maximum(scale / 2, _SMALLEST)),
        tf.where(tf.logical_and(finite, tf.logical_not(full)), good_steps + 1, tf.zeros_like(good_steps)),
    )


def all_finite(tensors: Iterable[Any]) -> tf.Tensor:
    """A bool scalar: whether no value of these gradients is infinite or not a number.

    None, empty tensors and integers are finite; of `tf.IndexedSlices` the rows count. Local.
    """
    flags = []
    for tensor in tensors:
        values = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
        if values is None:
            continue
        values = tf.convert_to_tensor(values)
        parts = [tf.math.real(values), tf.math.imag(values)] if values.dtype.is_complex else [values]
        if parts[0].dtype.is_floating:
            flags += [tf.reduce_all(tf.math.is_finite(part)) for part in parts]
    return tf.reduce_all(tf.stack(flags)) if flags else tf.constant(True)
