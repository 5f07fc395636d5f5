"""What the tests of checkpoints share: every kind of optimizer, small variables, one rank of any number."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdvars as hv
from hvdvars import session, slots

tf_keras = pytest.importorskip("tf_keras")
if not hasattr(keras, "Variable"):
    pytest.skip("these tests compare Keras 2 and 3 in one process", allow_module_level=True)


def use_world(rank=0, size=1):
    session.start(session.World(rank, size, rank, size, 0, 1, 1, "none"))


K3, K2, LEGACY, V1 = keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy, tf.compat.v1.train
ADAM_SLOTS = {"momentums", "velocities"}
# Name → (how to make it, its slots, what it keeps once).
OPTIMIZERS = {
    "adam": (lambda: K3.Adam(0.1, amsgrad=True), {*ADAM_SLOTS, "velocity_hats"}, set()),
    "adamw": (lambda: K3.AdamW(0.1), ADAM_SLOTS, set()),
    "adam-ema": (lambda: K3.Adam(0.1, use_ema=True), {*ADAM_SLOTS, "model_variables_moving_average"}, set()),
    "sgd": (lambda: K3.SGD(0.1), set(), set()),
    "momentum": (lambda: K3.SGD(0.1, momentum=0.9, nesterov=True), {"momentums"}, set()),
    "rmsprop": (
        lambda: K3.RMSprop(0.1, centered=True, momentum=0.5),
        {"velocities", "momentums", "average_gradients"},
        set(),
    ),
    "adagrad": (lambda: K3.Adagrad(0.1), {"accumulators"}, set()),
    "adadelta": (lambda: K3.Adadelta(0.1), {"accumulated_grads", "accumulated_delta_vars"}, set()),
    "adamax": (lambda: K3.Adamax(0.1), {"m", "u"}, set()),
    "nadam": (lambda: K3.Nadam(0.1), ADAM_SLOTS, {"u_product"}),
    "ftrl": (lambda: K3.Ftrl(0.1), {"accumulators", "linears"}, set()),
    "lion": (lambda: K3.Lion(0.1), {"momentums"}, set()),
    "adafactor": (lambda: K3.Adafactor(0.1), {"r", "c", "v"}, set()),
    "lamb": (lambda: K3.Lamb(0.1), ADAM_SLOTS, set()),
    "loss-scale": (
        lambda: K3.LossScaleOptimizer(K3.Adam(0.1), initial_scale=2.0),
        {f"inner.{name}" for name in ADAM_SLOTS},
        {"step_counter", "dynamic_scale", "inner.iterations", "inner.learning_rate"},
    ),
    "keras2-adam": (lambda: K2.Adam(0.1, amsgrad=True), {*ADAM_SLOTS, "velocity_hats"}, set()),
    "keras2-adamw": (lambda: K2.AdamW(0.1), ADAM_SLOTS, set()),
    "keras2-sgd": (lambda: K2.SGD(0.1), {"momentums"}, set()),
    "keras2-momentum": (lambda: K2.SGD(0.1, momentum=0.9), {"momentums"}, set()),
    "keras2-rmsprop": (
        lambda: K2.RMSprop(0.1, centered=True, momentum=0.5),
        {"velocities", "momentums", "average_gradients"},
        set(),
    ),
    "keras2-adagrad": (lambda: K2.Adagrad(0.1), {"accumulators"}, set()),
    "keras2-adadelta": (lambda: K2.Adadelta(0.1), {"accumulated_grads", "accumulated_delta_vars"}, set()),
    "keras2-adamax": (lambda: K2.Adamax(0.1), {"m", "u"}, set()),
    "keras2-nadam": (lambda: K2.Nadam(0.1), ADAM_SLOTS, {"u_product"}),
    "keras2-ftrl": (lambda: K2.Ftrl(0.1), {"accumulators", "linears"}, set()),
    "keras2-lion": (lambda: K2.Lion(0.1), {"momentums"}, set()),
    "legacy-adam": (lambda: LEGACY.Adam(0.1), {"m", "v"}, set()),
    "legacy-momentum": (lambda: LEGACY.SGD(0.1, momentum=0.9), {"momentum"}, set()),
    "legacy-nadam": (lambda: LEGACY.Nadam(0.1), {"m", "v"}, {"m_cache"}),
    "v1-adam": (lambda: V1.AdamOptimizer(0.1), {"m", "v"}, {"beta1_power", "beta2_power"}),
    "v1-momentum": (lambda: V1.MomentumOptimizer(0.1, 0.9), {"momentum"}, set()),
    "v1-rmsprop": (lambda: V1.RMSPropOptimizer(0.1, centered=True), {"mg", "momentum", "rms"}, set()),
    "v1-descent": (lambda: V1.GradientDescentOptimizer(0.1), set(), set()),
}
# Keras 2's Nadam multiplies its product of momentums anew with (almost) every variable, so that cutting matters.
WHOLE_ONLY = {"adafactor", "lamb", "loss-scale", "keras2-nadam"}
SHAPES = [(3, 2), (5,), ()]


def make_variables(kind=""):
    values = [np.linspace(-1, 1, math.prod(shape), dtype="float32").reshape(shape) for shape in SHAPES]
    if kind.startswith(("keras2", "legacy", "v1")):
        return [tf.Variable(value, name=f"w{i}") for i, value in enumerate(values)]
    return [keras.Variable(value, name=f"w{i}") for i, value in enumerate(values)]


def gradients(step):
    generator = np.random.default_rng(step)
    return [tf.constant(generator.standard_normal(shape).astype("float32")) for shape in SHAPES]


def train(mgr, optimizer, variables, first, last):
    for step in range(first, last):
        mgr.apply_gradients(optimizer, gradients(step), variables)


def values_of(variables):
    return [slots.read(variable) for variable in variables]


def assert_equal(variables, values):
    for variable, value in zip(variables, values, strict=True):
        np.testing.assert_array_equal(slots.read(variable), value)


def assert_close(variables, values):
    """Up to rounding: a processor takes the elements of a shard by fours where those of a variable come alone."""
    for variable, value in zip(variables, values, strict=True):
        np.testing.assert_allclose(slots.read(variable), value, 1e-5, 1e-6)


MANAGERS = {
    "horovod": lambda: hv.create("horovod"),
    "variables": lambda: hv.create("parameter_server"),
    "elements": lambda: hv.create("parameter_server", placement="elements"),
}


def saved(tmp_path, extra=None, steps=2, mode="horovod"):
    optimizer, variables, mgr = K3.Adam(0.1), make_variables(), MANAGERS[mode]()
    train(mgr, optimizer, variables, 0, steps)
    path = hv.checkpoint.save(tmp_path / "file", mgr, variables=variables, optimizer=optimizer, extra=extra)
    return path, variables, optimizer, mgr


def refused(kind, match, path, mgr=None, **arguments):
    """Restoring raises, and leaves the variables as they are."""
    variables = arguments.setdefault("variables", make_variables())
    before = values_of(variables)
    with pytest.raises(kind, match=match):
        hv.checkpoint.restore(path, mgr or hv.create("horovod"), **arguments)
    assert_equal(variables, before)
