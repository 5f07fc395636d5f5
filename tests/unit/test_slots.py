"""Optimizer state found by name, cut into pieces and put together again."""

import math

import numpy as np
import pytest
import tensorflow as tf
from checkpoint_tools import ADAM_SLOTS, K3, OPTIMIZERS, make_variables, use_world
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdvars import holding, options, owner, session, slots
from hvdvars.reduce import Form


@pytest.fixture(autouse=True)
def one_rank():
    use_world()
    yield
    session.stop()


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


class Use:
    """What `mgr` keeps of one list of variables, as far as pieces are concerned."""

    def __init__(self, variables, plan, shards):
        self.variables, self.plan, self._shards, self.masters = variables, plan, shards, {}

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
            # Whole variables have slots before their first gradient; what is in no bucket has none.
            if (index != skipped or placement == "variables") and math.prod(shape):
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
    whole, _ = holding.assemble(headers, received)
    assert {key for key in whole if whole[key].size} == set(wanted)
    for key, value in wanted.items():
        np.testing.assert_array_equal(whole[key], value)


def test_a_missing_piece_is_noticed():
    with pytest.raises(RuntimeError, match="do not make up the slots.*momentums"):
        holding.assemble([[[["momentums", 0, 0, [3]]], []]], [[np.zeros(2, "float32")]])
