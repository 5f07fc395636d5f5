"""Save and restore on one rank: every optimizer, every kind of manager, plain readers of the file."""

import json
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from checkpoint_tools import (
    K3,
    MANAGERS,
    OPTIMIZERS,
    WHOLE_ONLY,
    assert_close,
    assert_equal,
    gradients,
    make_variables,
    saved,
    train,
    use_world,
    values_of,
)

import hvdvars as hv
from hvdvars import session


@pytest.fixture(autouse=True)
def one_rank():
    use_world()
    yield
    session.stop()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_never_interrupted(name, tmp_path):
    """From one kind of manager to the next, each with a new optimizer."""
    make = OPTIMIZERS[name][0]
    optimizer, variables = make(), make_variables(name)
    train(hv.create("independent"), optimizer, variables, 0, 8)
    expected = values_of(variables)
    path = None
    for turn, mode in enumerate(["elements", "variables", "horovod", "elements"]):
        if name == "loss-scale" or (mode == "elements" and name in WHOLE_ONLY):
            mode = "horovod"
        optimizer, variables, mgr = make(), make_variables(name), MANAGERS[mode]()
        if path is not None:
            assert hv.checkpoint.restore(path, mgr, variables=variables, optimizer=optimizer) == {"turn": turn}
        train(mgr, optimizer, variables, 2 * turn, 2 * turn + 2)
        path = hv.checkpoint.save(
            tmp_path / "x", mgr, variables=variables, optimizer=optimizer, extra={"turn": turn + 1}
        )
    assert_close(variables, expected)


@pytest.mark.parametrize("name", ["adam", "nadam", "keras2-adam", "legacy-adam", "v1-adam"])
@pytest.mark.parametrize("mode", MANAGERS)
def test_restored_before_the_first_step_and_after_others(name, mode, tmp_path):
    make = OPTIMIZERS[name][0]
    optimizer, variables, mgr = make(), make_variables(name), MANAGERS["elements"]()
    train(mgr, optimizer, variables, 0, 2)
    path = hv.checkpoint.save(tmp_path / "x", mgr, variables=variables, optimizer=optimizer)
    train(mgr, optimizer, variables, 2, 4)
    expected = values_of(variables)
    optimizer, variables, mgr = make(), make_variables(name), MANAGERS[mode]()
    hv.checkpoint.restore(path, mgr, variables=variables, optimizer=optimizer)
    # Before its first step it saves what it was given.
    again = hv.checkpoint.save(tmp_path / "again", mgr, variables=variables, optimizer=optimizer)
    with np.load(path) as one, np.load(again) as two:
        assert one.files == two.files
        for key in one.files[1:]:
            np.testing.assert_array_equal(one[key], two[key])
    for _ in range(2):
        train(mgr, optimizer, variables, 2, 4)
        assert_close(variables, expected)
        hv.checkpoint.restore(path, mgr, variables=variables, optimizer=optimizer)


def test_slots_are_there_without_the_managers_first_step(tmp_path):
    path, variables, optimizer, mgr = saved(tmp_path)
    train(mgr, optimizer, variables, 2, 4)
    expected = values_of(variables)
    optimizer, variables = K3.Adam(0.1), make_variables()
    mgr = hv.create("replicated")
    hv.checkpoint.restore(path, mgr, variables=variables, optimizer=optimizer)
    for step in (2, 3):
        optimizer.apply(mgr.reduce(gradients(step), variables), variables)
    assert_close(variables, expected)


@pytest.mark.parametrize("mode", ["horovod", "variables"])
def test_into_an_optimizer_that_was_built_by_hand(tmp_path, mode):
    path, variables, optimizer, mgr = saved(tmp_path)
    train(mgr, optimizer, variables, 2, 4)
    expected = values_of(variables)
    optimizer, variables, mgr = K3.Adam(0.1), make_variables(), MANAGERS[mode]()
    optimizer.build(variables)
    hv.checkpoint.restore(path, mgr, variables=variables, optimizer=optimizer)
    train(mgr, optimizer, variables, 2, 4)
    assert_close(variables, expected)


def test_variables_without_a_gradient_have_no_slots_in_shards(tmp_path):
    def steps(mgr, optimizer, variables, first, last):
        for step in range(first, last):
            mgr.apply_gradients(optimizer, [gradients(step)[0], None, gradients(step)[2]], variables)

    for first in ("elements", "variables"):
        optimizer, variables, mgr = K3.Adam(0.1), make_variables(), MANAGERS[first]()
        steps(mgr, optimizer, variables, 0, 2)
        path = hv.checkpoint.save(tmp_path / first, mgr, variables=variables, optimizer=optimizer)
        assert ("slot/momentums/1" in np.load(path).files) == (first == "variables")
        assert "slot/momentums/2" in np.load(path).files
        steps(mgr, optimizer, variables, 2, 4)
        expected = values_of(variables)
        for second in MANAGERS:
            optimizer, variables, mgr = K3.Adam(0.1), make_variables(), MANAGERS[second]()
            hv.checkpoint.restore(path, mgr, variables=variables, optimizer=optimizer)
            steps(mgr, optimizer, variables, 2, 4)
            assert_close(variables, expected)


def test_the_learning_rate_may_be_changed_after_a_restore(tmp_path):
    path, *_ = saved(tmp_path)
    for mode in MANAGERS:
        optimizer, variables, mgr = K3.Adam(0.5), make_variables(), MANAGERS[mode]()
        hv.checkpoint.restore(path, mgr, variables=variables, optimizer=optimizer)
        assert float(optimizer.learning_rate) == np.float32(0.1) and int(optimizer.iterations) == 2
        optimizer.learning_rate = 0.25
        train(mgr, optimizer, variables, 2, 3)
        assert float(optimizer.learning_rate) == 0.25 and int(optimizer.iterations) == 3


def test_weights_alone_and_odd_dtypes(tmp_path):
    dtypes = ("float64", "float16", "bfloat16", "int64", "bool", "complex64", "uint8")
    variables = [tf.Variable(tf.cast([[0.0, 1.0, 3.0]], dtype), name=dtype) for dtype in dtypes]
    variables += [tf.Variable(tf.zeros([0, 3])), tf.Variable(tf.cast(2.5, "bfloat16"))]
    before = values_of(variables)
    mgr = hv.create("horovod")
    path = hv.checkpoint.save(tmp_path / "a.b", mgr, variables=variables)
    assert path == tmp_path / "a.b"
    for variable in variables:
        variable.assign(tf.zeros_like(variable))
    assert hv.checkpoint.restore(path, mgr, variables=variables) == {}
    assert_equal(variables, before)
    with np.load(path) as file:  # bfloat16 is the upper half of float32
        assert file["variable/2"].dtype == "uint16"
        np.testing.assert_array_equal((file["variable/2"].astype("uint32") << 16).view("float32"), [[0, 1, 3]])


def test_a_keras_model_and_variables_beside_it(tmp_path):
    def make():
        layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
        return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(2)])

    model, step = make(), tf.Variable(7, dtype=tf.int64, name="step")
    path = hv.checkpoint.save(tmp_path / "m", hv.create("horovod"), model=model, variables=[step, model.weights[0]])
    assert len(json.loads(str(np.load(path)["meta"]))["variables"]) == len(model.weights) + 1
    other, other_step = make(), tf.Variable(0, dtype=tf.int64, name="step")
    hv.checkpoint.restore(path, hv.create("horovod"), model=other, variables=[other_step])
    assert_equal(other.weights, values_of(model.weights))
    assert int(other_step) == 7


@pytest.mark.parametrize("make", [lambda: K3.Adam(0.1), lambda: K3.SGD(0.1, momentum=0.9)], ids=["adam", "momentum"])
def test_numpy_and_plain_keras_read_it_as_documented(make, tmp_path, monkeypatch):
    def make_model():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((4,)), *layers])

    def steps(model, apply, first, last):
        for step in range(first, last):
            x = np.random.default_rng(step).standard_normal((6, 4)).astype("float32")
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - 1.0))
            apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    monkeypatch.chdir(tmp_path)
    model, optimizer, mgr = make_model(), make(), MANAGERS["elements"]()
    steps(model, lambda *given: mgr.apply_gradients(optimizer, *given), 0, 2)
    hv.checkpoint.save("epoch3", mgr, model=model, optimizer=optimizer)
    steps(model, lambda *given: mgr.apply_gradients(optimizer, *given), 2, 4)
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    _, with_numpy, into_keras = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {"np": np, "json": json, "model": make_model(), "optimizer": make()}
    exec(with_numpy + into_keras, names)
    steps(names["model"], names["optimizer"].apply, 2, 4)
    assert_close(names["model"].weights, values_of(model.weights))
    slots_ = {"Adam": ["momentums", "velocities"], "SGD": ["momentums"]}[type(optimizer).__name__]
    expected = {"class": type(optimizer).__name__, "slots": slots_, "scalars": ["iterations", "learning_rate"]}
    assert names["meta"]["optimizer"] == expected
    assert [one["shape"] for one in names["meta"]["variables"]] == [list(weight.shape) for weight in model.weights]
