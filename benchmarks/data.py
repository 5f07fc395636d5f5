"""What a step works on: the variables of a profile, and gradients for them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from benchmarks.contenders import Contender
from benchmarks.profiles import FLOAT_BYTES, Profile, Shape
from benchmarks.worlds import World

LARGE_BYTES = 64 << 10


@dataclass(frozen=True)
class Data:
    """A profile's variables, and where its gradients come from: nothing TensorFlow could fold away.

    Small gradients are filled by the step itself, each with its own element of the variable `values`, because reading
    a thousand more variables would cost more than the update; large ones are variables, because filling them would.
    All with one scalar would not do: TensorFlow would see that they are equal and merge them, and Horovod's operations
    on them as well.
    """

    variables: list[Any]
    shapes: tuple[Shape, ...]
    values: Any
    large: dict[int, Any]

    def read(self) -> list[Any]:
        """The gradients as tensors of the current graph."""
        import tensorflow as tf

        values = tf.unstack(self.values.read_value())
        return [
            self.large[i].read_value() if i in self.large else tf.fill(shape, values[i])
            for i, shape in enumerate(self.shapes)
        ]


def make_data(world: World, spec: Contender, profile: Profile) -> Data:
    """Variables of zeros, Keras ones for a Keras optimizer; every gradient is rank + 1 everywhere. Local."""
    import tensorflow as tf

    make = tf.Variable
    if spec.optimizer == "adam":
        import keras

        make = getattr(keras, "Variable", tf.Variable)
    variables = [make(tf.zeros(shape), name=f"v{i}") for i, shape in enumerate(profile.shapes)]
    large = {
        i: tf.Variable(tf.fill(shape, world.rank + 1.0), trainable=False)
        for i, shape in enumerate(profile.shapes)
        if FLOAT_BYTES * math.prod(shape) > LARGE_BYTES
    }
    values = tf.Variable(tf.fill([len(variables)], world.rank + 1.0), trainable=False)
    return Data(variables, profile.shapes, values, large)
