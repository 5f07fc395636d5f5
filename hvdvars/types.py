"""Aliases shared by all layers; no logic, and nothing imported at run time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import tensorflow as tf

Tensor: TypeAlias = "tf.Tensor"
Variable: TypeAlias = Any
"""A `tf.Variable`, a Keras 2 variable or a Keras 3 `Variable` (which is no subclass of the first)."""

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"
"""What `GradientTape.gradient` gives for one variable; `None` where the loss does not depend on it."""

Gradients: TypeAlias = "Sequence[Gradient]"
"""One gradient per variable, in the order of the variables."""

Apply: TypeAlias = Callable[[list[Any], list[Any]], Any]
"""`apply(grads, variables)`: what a caller may give in place of an optimizer."""

Optimizer: TypeAlias = Any
"""A Keras 2, Keras 3 or `tf.compat.v1.train` optimizer, or an `Apply` callable."""
