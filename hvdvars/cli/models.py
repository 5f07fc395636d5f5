"""Models and optimizers by name. Every rank builds the same structure; rank 0's values are broadcast afterwards."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdvars.cli.errors import UsageError

_MINIMUM = {"InceptionV3": 75, "InceptionResNetV2": 75, "Xception": 71}
_USUAL_MINIMUM = 32
_LEARNING_RATES = {"sgd": 0.1, "momentum": 0.05, "adam": 0.002}


def build_model(name: str, input_shape: tuple[int, ...], classes: int) -> Any:
    """A Keras model from samples of ``input_shape`` to ``classes`` scores each.

    Local. Raises UsageError where the model does not fit the data.
    """
    if name == "mlp":
        return mlp(input_shape, classes)
    if ":" in name:
        return from_file(name, input_shape, classes)
    if len(input_shape) != 3:
        raise UsageError(f"--model {name} works on images, but one sample has shape {input_shape}; use --model mlp")
    return cnn(input_shape, classes) if name == "cnn" else application(name, input_shape, classes)


def mlp(input_shape: tuple[int, ...], classes: int) -> Any:
    """Two hidden layers of 256 units. Local."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input(input_shape),
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.Dense(256, activation="relu"),
            layers.Dense(classes),
        ],
        name="mlp",
    )


def cnn(input_shape: tuple[int, ...], classes: int) -> Any:
    """Pairs of 3×3 convolutions, each halving the image until its shorter side is at most 4; then two dense layers."""
    layers = tf.keras.layers
    stack: list[Any] = [layers.Input(input_shape)]
    side, filters = min(input_shape[:2]), 32
    while True:
        for _ in range(2):
            stack.append(layers.Conv2D(filters, 3, padding="same", activation="relu"))
        if side >= 2:
            stack.append(layers.MaxPooling2D())
        side, filters = side // 2, min(2 * filters, 128)
        if side <= 4:
            break
    stack += [layers.Flatten(), layers.Dropout(0.5), layers.Dense(128, activation="relu"), layers.Dense(classes)]
    return tf.keras.Sequential(stack, name="cnn")


def application(name: str, input_shape: tuple[int, ...], classes: int) -> Any:
    """A model of ``keras.applications`` without weights; images below its minimum are enlarged first. Local."""
    make = getattr(tf.keras.applications, name, None)
    if make is None:
        raise UsageError(
            f"--model {name!r}: keras.applications of this Keras ({tf.keras.__version__}) has no such model"
        )
    height, width, channels = input_shape
    minimum = _MINIMUM.get(name, _USUAL_MINIMUM)
    shape = (max(height, minimum), max(width, minimum), channels)
    settings: dict[str, Any] = {"weights": None, "input_shape": shape, "classes": classes}
    accepted = inspect.signature(make).parameters
    if "classifier_activation" in accepted:
        settings["classifier_activation"] = None
    if "include_preprocessing" in accepted:
        settings["include_preprocessing"] = False  # It expects values up to 255.
    core = make(**settings)
    before: list[Any] = []
    if shape[:2] != (height, width):
        before.append(tf.keras.layers.Resizing(*shape[:2]))
    if name.startswith("EfficientNetB"):
        before.append(tf.keras.layers.Rescaling(255.0))  # Its own scaling to [0, 1] cannot be switched off.
    if not before:
        return core
    return tf.keras.Sequential([tf.keras.layers.Input(input_shape), *before, core], name=name.lower())


def from_file(text: str, input_shape: tuple[int, ...], classes: int) -> Any:
    """What ``file.py:function`` returns, given ``input_shape`` and ``classes`` if it has such arguments. Local."""
    path, _, function = text.rpartition(":")
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # As for a script: the file may import its neighbours.
    found = importlib.util.spec_from_file_location(f"hvdvars_model_{Path(path).stem}", path)
    if found is None or found.loader is None:
        raise UsageError(f"--model {text!r}: {path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    make = getattr(module, function, None)
    if not callable(make):
        raise UsageError(f"--model {text!r}: {function} in {path} is not a function")
    accepted = inspect.signature(make).parameters
    known = {"input_shape": input_shape, "classes": classes}
    model = make(**{name: value for name, value in known.items() if name in accepted})
    if not isinstance(model, tf.keras.Model):
        raise UsageError(f"--model {text!r}: {function} returned {type(model).__name__}; expected a Keras model")
    return model


def gives_probabilities(name: str, model: Any, samples: np.ndarray[Any, Any], classes: int) -> bool:
    """Call the model on some samples, which builds it, and tell whether its scores are probabilities or logits.

    Local. Raises UsageError if the scores are not ``[sample, class]`` for at least ``classes`` classes, or if the model
    has nothing to train.
    """
    call = functools.partial(model, training=False)
    # As one graph if possible: a deep model, called eagerly, makes TensorFlow warn of retracing.
    scores = tf.function(call, autograph=False, jit_compile=False)(samples) if model.built else call(samples)
    shape = tuple(getattr(scores, "shape", ()))
    if len(shape) != 2 or shape[0] != len(samples) or shape[1] < classes:
        raise UsageError(
            f"--model {name}: gives {'shape ' + str(shape) if shape else type(scores).__name__} for {len(samples)} "
            f"samples; expected one score for each of {classes} classes, shape {(len(samples), classes)}"
        )
    if not model.trainable_variables:
        raise UsageError(f"--model {name}: has no trainable variable")
    values = tf.cast(scores, tf.float32).numpy()
    return bool((values >= 0).all() and np.allclose(values.sum(axis=1), 1, atol=1e-2))


def make_optimizer(name: str, learning_rate: float | None) -> Any:
    """A Keras optimizer; the default learning rate is ours, else Keras's. Local. Raises UsageError."""
    keras = tf.keras.optimizers
    rate = _LEARNING_RATES.get(name) if learning_rate is None else learning_rate
    settings: dict[str, Any] = {} if rate is None else {"learning_rate": rate}
    if name == "momentum":
        return keras.SGD(momentum=0.9, **settings)
    make = getattr(keras, {"sgd": "SGD", "rmsprop": "RMSprop", "adam": "Adam", "adamw": "AdamW"}.get(name, name), None)
    if make is None:
        raise UsageError(f"--optimizer {name!r}: keras.optimizers of this Keras ({tf.keras.__version__}) has none")
    try:
        return make(**settings)
    except (TypeError, ValueError) as problem:
        raise UsageError(f"--optimizer {name!r} cannot be made from a learning rate alone: {problem}") from None


def count_parameters(variables: Sequence[Any]) -> int:
    """Numbers held in the variables. Local."""
    return sum(int(np.prod(variable.shape)) for variable in variables)
