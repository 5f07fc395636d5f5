"""The checkpoint's parts on one rank: optimizer state found by name, cut into pieces and back, the file, refusals."""

import json
import math
import os
import pickle
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import hvdvars as hv
from hvdvars import checkpoint, holding, options, owner, relay, session, slots, snapshot
from hvdvars.reduce import Form

tf_keras = pytest.importorskip("tf_keras")


def use_world(rank=0, size=1):
    session.start(session.World(rank, size, rank, size, 0, 1, "none"))


@pytest.fixture(autouse=True)
def one_rank():
    use_world()
    yield
    session.stop()


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


# --- optimizer state, by name ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_found_by_name(name):
    make, expected, once = OPTIMIZERS[name]
    optimizer, variables = make(), make_variables(name)
    before = slots.find(optimizer, variables)
    assert not before.built and not before.rest and not before.slots
    slots.create(optimizer, variables)
    state = slots.find(optimizer, variables)
    assert set(state.slots) == expected
    usual = {"learning_rate"} if name == "legacy-adam" else set()
    usual = set() if name.startswith("v1") else {*usual, "iterations", "learning_rate"}
    assert set(state.scalars) - usual == once
    assert not state.rest
    for held in state.slots.values():
        for variable, slot in zip(variables, held, strict=True):
            assert slot is not None and (name == "adafactor" or tuple(slot.shape) == tuple(variable.shape))
    # In another order, and for a variable that the optimizer does not know.
    other = tf.Variable(1.0)
    again = slots.find(optimizer, [variables[2], other, variables[0]])
    for key, held in again.slots.items():
        assert held[0] is state.slots[key][2] and held[1] is None and held[2] is state.slots[key][0]
    # What belongs to variables that were not asked for is known as the rest.
    assert {id(v) for v in again.rest} == {id(held[1]) for held in state.slots.values()}


def test_a_callable_keeps_nothing_unless_it_says_so():
    state = slots.find(lambda grads, variables: None, make_variables())
    assert (state.built, state.slots, state.scalars, state.rest) == (False, {}, {}, [])
    with pytest.raises(TypeError, match="optimizer must be"):
        slots.find(3, [])


def test_a_schedule_leaves_no_learning_rate():
    optimizer = K3.Adam(K3.schedules.ExponentialDecay(0.1, 3, 0.9))
    assert set(slots.find(optimizer, []).scalars) == {"iterations"}


# --- pieces ----------------------------------------------------------------------------------------------------------


class Use:
    """What `mgr` keeps of one list of variables, as far as pieces are concerned."""

    def __init__(self, variables, plan, shards):
        self.variables, self.plan, self._shards = variables, plan, shards

    @property
    def shards(self):
        class Any(dict):
            def get(_, key, default=None):  # noqa: N805
                return self._shards

        return Any()


def rank_holding(rank, size, variables, forms, chosen):
    """The holding of one of several ranks, as if it were ours: an Adam on its part."""
    use_world(rank, size)
    plan = owner.plan_ownership("test", forms, chosen)
    optimizer = K3.Adam()
    shards = owner.create_shards(plan) if chosen.placement == "elements" else []
    held = shards or owner.owned_variables(plan, variables)
    slots.create(optimizer, held)
    return holding.hold(optimizer, variables, [Use(variables, plan, shards)])


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6),
    large=st.booleans(),
    size=st.integers(1, 4),
    placement=st.sampled_from(["variables", "elements"]),
    skipped=st.integers(0, 5),
)
def test_pieces_of_any_number_of_ranks_are_the_whole(shapes, large, size, placement, skipped):
    shapes = [tuple(shape) for shape in shapes] + ([(17001,)] if large else [])
    variables = [tf.Variable(tf.zeros(shape), name=f"v{i}") for i, shape in enumerate(shapes)]
    forms = [Form("none" if i == skipped else "dense", shape, "float32") for i, shape in enumerate(shapes)]
    chosen = options.resolve("parameter_server", placement=placement)
    holdings = [rank_holding(rank, size, variables, forms, chosen) for rank in range(size)]
    wanted = {}
    for slot in ADAM_SLOTS:
        for index, shape in enumerate(shapes):
            if index != skipped and math.prod(shape):
                wanted[slot, index] = np.random.default_rng(index).standard_normal(shape).astype("float32")
    for rank, held in enumerate(holdings):
        use_world(rank, size)
        for (slot, index), value in wanted.items():
            held.write(slot, index, value)
        held.finish()
    headers, received = [], []
    for held in holdings:
        pieces = list(held.pieces())
        headers.append([[[p.slot, p.variable, p.start, list(p.shape)] for p in pieces], []])
        received.append([p.values for p in pieces])
    whole, _ = checkpoint._assemble(headers, received)
    assert {key for key in whole if whole[key].size} == set(wanted)
    for key, value in wanted.items():
        np.testing.assert_array_equal(whole[key], value)


def test_a_missing_piece_is_noticed():
    with pytest.raises(RuntimeError, match="do not make up the slots.*momentums"):
        checkpoint._assemble([[[["momentums", 0, 0, [3]]], []]], [[np.zeros(2, "float32")]])


# --- save and restore on one rank ------------------------------------------------------------------------------------

MANAGERS = {
    "horovod": lambda: hv.create("horovod"),
    "variables": lambda: hv.create("parameter_server"),
    "elements": lambda: hv.create("parameter_server", placement="elements"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_never_interrupted(name, tmp_path):
    """From one kind of manager to the next, each with a new optimizer."""
    make = OPTIMIZERS[name][0]
    optimizer, variables = make(), make_variables(name)
    train(hv.create("independent"), optimizer, variables, 0, 8)
    expected = values_of(variables)
    path = None
    for turn, mode in enumerate(["elements", "variables", "horovod", "elements"]):
        if mode == "elements" and name in WHOLE_ONLY:
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


def saved(tmp_path, extra=None, steps=2, mode="horovod"):
    optimizer, variables, mgr = K3.Adam(0.1), make_variables(), MANAGERS[mode]()
    train(mgr, optimizer, variables, 0, steps)
    path = hv.checkpoint.save(tmp_path / "file", mgr, variables=variables, optimizer=optimizer, extra=extra)
    return path, variables, optimizer, mgr


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


def test_variables_without_a_gradient_have_no_slots_with_owners(tmp_path):
    def steps(mgr, optimizer, variables, first, last):
        for step in range(first, last):
            mgr.apply_gradients(optimizer, [gradients(step)[0], None, gradients(step)[2]], variables)

    for first in ("elements", "variables"):
        optimizer, variables, mgr = K3.Adam(0.1), make_variables(), MANAGERS[first]()
        steps(mgr, optimizer, variables, 0, 2)
        path = hv.checkpoint.save(tmp_path / first, mgr, variables=variables, optimizer=optimizer)
        assert "slot/momentums/1" not in np.load(path).files and "slot/momentums/2" in np.load(path).files
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


# --- refusals --------------------------------------------------------------------------------------------------------


def refused(kind, match, path, mgr=None, **arguments):
    """Restoring raises, and leaves the variables as they are."""
    variables = arguments.setdefault("variables", make_variables())
    before = values_of(variables)
    with pytest.raises(kind, match=match):
        hv.checkpoint.restore(path, mgr or hv.create("horovod"), **arguments)
    assert_equal(variables, before)


def test_other_variables_are_refused(tmp_path):
    path, variables, *_ = saved(tmp_path)
    refused(ValueError, "3 variables in the file, 2 here", path, variables=make_variables()[:2])
    swapped = [variables[1], variables[0], variables[2]]
    refused(ValueError, r"variables\[0\] is w0 \(3, 2\) float32 in the file and w1 \(5,\)", path, variables=swapped)
    renamed = [keras.Variable(v.value, name=f"u{i}") for i, v in enumerate(variables)]
    refused(ValueError, r"w0 .* in the file and u0", path, variables=renamed)
    wider = [keras.Variable(np.float64(v.value), dtype="float64", name=v.name) for v in variables]
    refused(ValueError, "float32 in the file and w0 .*float64 here", path, variables=wider)


def test_other_optimizers_are_refused(tmp_path):
    path, variables, *_ = saved(tmp_path)
    refused(ValueError, "the optimizer Adam, not of SGD", path, optimizer=K3.SGD())
    refused(ValueError, "the optimizer Adam, not of callable", path, optimizer=lambda grads, variables: None)
    refused(TypeError, "optimizer must be", path, optimizer="adam")
    refused(ValueError, r"keeps the slots .*velocity_hats.*checkpoint has", path, optimizer=K3.Adam(amsgrad=True))
    bare = hv.checkpoint.save(tmp_path / "bare", hv.create("horovod"), variables=variables)
    refused(ValueError, "saved without an optimizer", bare, optimizer=K3.Adam())
    new, fresh, mgr = K3.Adam(), make_variables(), MANAGERS["elements"]()
    unused = hv.checkpoint.save(tmp_path / "unused", mgr, variables=fresh, optimizer=new)
    hv.checkpoint.restore(unused, mgr, variables=fresh, optimizer=new)
    train(mgr, new, fresh, 0, 1)
    refused(ValueError, r"the checkpoint has \[\]", unused, mgr, variables=fresh, optimizer=new)


def test_slots_that_do_not_fit_are_refused_at_the_first_step_with_owners(tmp_path):
    path, *_ = saved(tmp_path)
    for mode in ("elements", "variables"):
        optimizer, variables, mgr = K3.Adam(amsgrad=True), make_variables(), MANAGERS[mode]()
        hv.checkpoint.restore(path, mgr, variables=variables, optimizer=optimizer)
        with pytest.raises(ValueError, match="velocity_hats.*Create the optimizer with the arguments"):
            train(mgr, optimizer, variables, 0, 1)


def test_wrong_arguments(tmp_path):
    variables, mgr = make_variables(), hv.create("horovod")
    calls = [
        (ValueError, r"checkpoint\.save: give model= or variables=", {}),
        (TypeError, r"variables must be a list", {"variables": variables[0]}),
        (TypeError, r"variables\[0\] must be a variable", {"variables": [1.0]}),
        (TypeError, "extra must be a dict", {"variables": variables, "extra": [1]}),
        (TypeError, "not JSON serializable", {"variables": variables, "extra": {"x": np.float32(1)}}),
        (TypeError, "model must be a Keras model", {"model": 3}),
        (ValueError, "no weights yet", {"model": keras.Sequential([keras.layers.Dense(3)])}),
        (TypeError, "no number; it cannot be saved", {"variables": [tf.Variable("text")]}),
    ]
    for kind, match, arguments in calls:
        with pytest.raises(kind, match=match):
            hv.checkpoint.save(tmp_path / "x", mgr, **arguments)
    with pytest.raises(TypeError, match="what hvdvars.create gave, got Adam"):
        hv.checkpoint.save(tmp_path / "x", K3.Adam(), variables=variables)
    with pytest.raises(RuntimeError, match="outside of tf.function"):
        tf.function(lambda: hv.checkpoint.save(tmp_path / "x", mgr, variables=variables), autograph=False)()
    assert list(tmp_path.iterdir()) == []
    session.stop()
    with pytest.raises(RuntimeError, match=r"hvdvars.checkpoint.save was called before hvdvars.init"):
        hv.checkpoint.save(tmp_path / "x", mgr, variables=variables)


def test_all_that_the_optimizer_trains_and_keeps_is_asked_for(tmp_path):
    _, variables, optimizer, mgr = saved(tmp_path)
    with pytest.raises(ValueError, match=r"Adam trains w2 \(and 0 more\), which is neither"):
        hv.checkpoint.save(tmp_path / "x", mgr, variables=variables[:2], optimizer=optimizer)
    two, few = K3.Adam(0.1), make_variables()[:2]
    path = hv.checkpoint.save(tmp_path / "two", mgr, variables=few, optimizer=two)
    refused(ValueError, "Adam trains w2", path, mgr, variables=variables[:2], optimizer=optimizer)
    other = K3.Adam()
    other.build(variables)
    with pytest.raises(ValueError, match="keeps adam.*w2_momentum, .*belong to none of the variables"):
        hv.checkpoint.save(tmp_path / "x", mgr, variables=variables[:2], optimizer=other)

    class Counting:
        def __init__(self):
            self.variables = [tf.Variable(3, name="calls")]

        def __call__(self, grads, variables):
            self.variables[0].assign_add(1)

    counting = Counting()
    with pytest.raises(ValueError, match="keeps calls, .*to variables="):
        hv.checkpoint.save(tmp_path / "x", mgr, variables=variables, optimizer=counting)
    together = [*variables, *counting.variables]
    path = hv.checkpoint.save(tmp_path / "x", mgr, variables=together, optimizer=counting)
    counting.variables[0].assign(0)
    hv.checkpoint.restore(path, mgr, variables=together, optimizer=counting)
    assert int(counting.variables[0]) == 3


# --- the file --------------------------------------------------------------------------------------------------------


def test_files_that_are_none(tmp_path):
    refused(FileNotFoundError, "there is no file .*none.npz on rank 0", tmp_path / "none")
    (tmp_path / "folder.npz").mkdir()
    refused(OSError, "folder.npz", tmp_path / "folder")
    np.savez(tmp_path / "foreign.npz", a=np.zeros(3))
    refused(ValueError, "has no 'meta'", tmp_path / "foreign")
    np.savez(tmp_path / "other.npz", meta=np.array("[1]"))
    refused(ValueError, "not in the format", tmp_path / "other")
    np.save(tmp_path / "array.npz", np.zeros(3))
    refused(ValueError, "array.npz", tmp_path / "array.npz.npy")
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps({"meta": 1}))
    refused(ValueError, "damaged or no checkpoint", tmp_path / "pickle")
    (tmp_path / "empty.npz").write_bytes(b"")
    refused(ValueError, "damaged or no checkpoint", tmp_path / "empty")
    np.savez(tmp_path / "newer.npz", meta=np.array(json.dumps({"format": "hvdvars", "version": 2})))
    refused(ValueError, "has version 2; this hvdvars reads up to 1", tmp_path / "newer")


def test_a_damaged_file_is_refused_or_the_same(tmp_path):
    path, variables, *_ = saved(tmp_path)
    _, sound = snapshot.read(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="damaged or no checkpoint"):
            snapshot.read(path)
    noticed = 0
    for place in range(0, len(whole), 11):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            _, arrays = snapshot.read(path)
        except ValueError:
            noticed += 1
            continue
        assert arrays.keys() == sound.keys() and all(np.array_equal(arrays[key], sound[key]) for key in sound)
    assert noticed > len(whole) / 11 / 2


def test_a_file_is_whole_or_absent(tmp_path, monkeypatch):
    path, variables, *_ = saved(tmp_path)
    before = path.read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    for name in ("file", "new"):
        with pytest.raises(OSError, match="checkpoint.save: .*No space left"):
            hv.checkpoint.save(tmp_path / name, hv.create("horovod"), variables=variables)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.npz"]


def test_folders_are_made_links_kept_and_permissions_usual(tmp_path):
    path = snapshot.file_path(tmp_path / "a" / "b" / "c")
    snapshot.write(path, {"variables": [], "optimizer": None}, {})
    assert path.name == "c.npz" and path.exists()
    (tmp_path / "plain").write_text("")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    link = tmp_path / "link.npz"
    link.symlink_to(path)
    snapshot.write(link, {"variables": [], "optimizer": None, "n": 2}, {})
    assert link.is_symlink() and snapshot.read(path)[0]["n"] == 2
    assert snapshot.file_path("x") == snapshot.file_path("x.npz") and str(snapshot.file_path("x.y")) == "x.y"
    assert os.fspath(snapshot.file_path(tmp_path)) == f"{tmp_path}.npz"


# --- shared outcomes and arrays on the move --------------------------------------------------------------------------


def test_errors_keep_their_kind_and_name_the_function():
    def fail(error):
        raise error

    for error, kind in [
        (ValueError("a"), ValueError),
        (PermissionError(13, "a"), PermissionError),
        (NotADirectoryError("a"), OSError),
        (KeyError("a"), RuntimeError),
        (tf.errors.InvalidArgumentError(None, None, "a"), RuntimeError),
    ]:
        for share in (relay.together, relay.from_root):
            with pytest.raises(kind, match=r"^f: .*a") as caught:
                share("f", lambda error=error: fail(error))
            assert caught.value.__cause__ is error
    assert relay.together("f", lambda: 3) == relay.from_root("f", lambda: 3) == 3


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_arrays_arrive_whatever_the_chunk(monkeypatch, chunk):
    monkeypatch.setattr(relay, "CHUNK_BYTES", chunk)
    bfloat16 = tf.bfloat16.as_numpy_dtype
    arrays = {
        "a": np.arange(3, dtype="uint8"),
        "b": np.arange(6.0).reshape(2, 3).T,
        "c": np.float32(3),
        "d": np.zeros((0, 2)),
        "e": np.arange(5).astype(bfloat16),
        "f": np.array([True, False]),
    }
    arrays = {key: np.asarray(value) for key, value in arrays.items()}
    received = dict(relay.deliver(arrays, relay.layout_of(arrays), "test"))
    assert received.keys() == arrays.keys()
    (own,) = relay.collect(list(arrays.values()), "test")
    for array, one, two in zip(arrays.values(), received.values(), own, strict=True):
        assert array.dtype == one.dtype == two.dtype and array.shape == one.shape == two.shape
        np.testing.assert_array_equal(array, one)
        np.testing.assert_array_equal(array, two)
