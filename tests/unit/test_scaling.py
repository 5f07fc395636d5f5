import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdvars.scaling import LossScale, all_finite, init, update

fast = settings(max_examples=40, deadline=None)


def run(flags, every_n, start=None):
    states = [start or init(8.0)]
    for finite in flags:
        states.append(update(states[-1], finite, every_n))
    return states[1:]


def test_doubles_on_the_step_after_n_normal_ones():
    assert run([True] * 7, 2) == [(8, 1), (8, 2), (16, 0), (16, 1), (16, 2), (32, 0), (32, 1)]


def test_a_step_that_is_not_finite_halves_and_resets():
    assert run([True, True, False, True, False, False], 2) == [(8, 1), (8, 2), (4, 0), (4, 1), (2, 0), (1, 0)]


def test_never_doubles_without_n():
    assert run([True] * 50, None)[-1] == (8, 50)


@fast
@given(st.lists(st.booleans(), max_size=20), st.one_of(st.none(), st.integers(1, 4)))
def test_tensors_follow_the_same_rule(flags, every_n):
    plain = run(flags, every_n)
    state = LossScale(tf.constant(8.0), tf.constant(0, tf.int64))
    for wanted, finite in zip(plain, flags, strict=True):
        state = update(state, tf.constant(finite), every_n)
        assert (state.scale.dtype, state.good_steps.dtype) == (tf.float32, tf.int64)
        assert (float(state.scale), int(state.good_steps)) == wanted


def test_in_a_graph_and_from_variables():
    scale, steps = tf.Variable(8.0), tf.Variable(0)

    @tf.function
    def step(finite):
        after = update(LossScale(scale, steps), finite, 1)
        scale.assign(after.scale)
        steps.assign(after.good_steps)

    seen = []
    for finite in [True, True, True, False]:
        step(tf.constant(finite))
        seen.append((float(scale), int(steps)))
    assert seen == run([True, True, True, False], 1)


@pytest.mark.parametrize("scale", [0, -1, math.inf, math.nan])
def test_init_refuses(scale):
    with pytest.raises(ValueError, match="loss scale must be finite"):
        init(scale)


def test_update_refuses_n_below_1():
    with pytest.raises(ValueError, match="every_n must be at least 1 or None, got 0"):
        update(init(1), True, 0)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_all_finite(dtype, bad):
    good = tf.cast([0.0, 1.0, -2.0], dtype)
    wrong = tf.cast([0.0, bad, 1.0], dtype)
    assert bool(all_finite([None, good, tf.constant(1.0)]))
    assert not bool(all_finite([good, None, wrong]))
    assert not bool(all_finite([tf.IndexedSlices(wrong, [0, 1, 1])]))


def test_all_finite_of_nothing_and_of_integers():
    assert bool(all_finite([])) and bool(all_finite([None]))
    assert bool(all_finite([tf.zeros([0, 3]), tf.constant([1, 2]), tf.constant([True])]))
    assert not bool(tf.function(lambda x: all_finite([x]))(np.float32([1, np.inf])))
    assert not bool(all_finite([tf.complex(1.0, math.nan)]))


@pytest.mark.parametrize("kind", [float, tf.constant])
def test_the_scale_stays_a_number(kind):
    high = LossScale(kind(2.0**127), 5)
    low = LossScale(kind(2.0**-126), 5)
    assert float(update(high, tf.constant(True) if kind is tf.constant else True, 1).scale) == 2.0**127
    assert float(update(low, tf.constant(False) if kind is tf.constant else False, 1).scale) == 2.0**-126
