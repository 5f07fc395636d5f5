import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdvars.smalltensors import (
    PLACEHOLDER,
    GradPackTuple,
    extract_ranges,
    pack_range,
    pack_small_tensors,
    unpack_grad_tuple,
    unpack_small_tensors,
)

fast = settings(max_examples=200, deadline=None)
slow = settings(max_examples=30, deadline=None)
indices = st.sets(st.integers(0, 80)).map(sorted)
limits = st.integers(0, 12)
gradients = st.lists(
    st.tuples(
        st.sampled_from([(), (1,), (3,), (2, 3), (0,), (2, 2, 2), (40,)]),
        st.sampled_from([np.float32, np.float32, np.float32, np.float16, np.float64, np.int32]),
    ),
    max_size=24,
)


def constants(values):
    """One tower's pairs; a variable is only carried along, so that a name does."""
    return [(tf.constant(value), f"v{index}") for index, value in enumerate(values)]


def run(tensors):
    tf.no_op()  # A session refuses a graph without ops.
    with tf.compat.v1.Session() as session:
        return session.run(tensors)


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as made:
        yield made


@fast
@given(indices, limits)
def test_ranges_and_singles_are_all_indices_once(wanted, limit):
    ranges, singles = extract_ranges(wanted, limit)
    covered = [index for first, last in ranges for index in range(first, last + 1)]
    assert sorted(covered + singles) == wanted
    assert singles == sorted(singles) and ranges == sorted(ranges)
    assert all(1 <= last - first <= limit + 1 for first, last in ranges)


@fast
@given(indices, limits)
def test_a_run_is_only_cut_where_it_is_full(wanted, limit):
    ranges, singles = extract_ranges(wanted, limit)
    runs = sorted([*ranges, *([single, single] for single in singles)])
    for (first, last), (begin, _) in zip(runs, runs[1:], strict=False):
        assert begin > last + 1 or last - first == limit + 1


def test_ranges_by_hand():
    assert extract_ranges([]) == ([], [])
    assert extract_ranges([7]) == ([], [7])
    assert extract_ranges([1, 3, 4, 6, 7, 8, 9]) == ([[3, 4], [6, 9]], [1])
    assert extract_ranges([0, 1, 2, 3, 4], 0) == ([[0, 1], [2, 3]], [4])
    assert extract_ranges(list(range(35))) == ([[0, 33]], [34])
    with pytest.raises(ValueError, match="extract_ranges.*2 comes after 2"):
        extract_ranges([1, 2, 2])


@slow
@given(gradients, st.integers(1, 3), st.sampled_from([0, 4, 16, 24, 32, 1000]), limits, st.integers(0, 2**16))
def test_unpacking_what_was_packed_gives_it_back(parts, towers, max_bytes, max_group, seed):
    rng = np.random.default_rng(seed)
    values = [[rng.integers(-9, 9, shape).astype(dtype) for shape, dtype in parts] for _ in range(towers)]
    with tf.Graph().as_default():
        given_towers = [constants(tower) for tower in values]
        packed, packing = pack_small_tensors(given_towers, max_bytes, max_group)
        unpacked = unpack_small_tensors(packed, packing)
        if packing is None:
            assert packed is given_towers and unpacked is given_towers
        else:
            assert set(packing) == {f"{t}:{n}" for t in range(towers) for n in range(len(packing) // towers)}
            assert len(packed[0]) < len(parts)
        assert [[var for _, var in tower] for tower in unpacked] == [[f"v{i}" for i in range(len(parts))]] * towers
        fetched = run([[grad for grad, _ in tower] for tower in unpacked])
    for tower, wanted in zip(fetched, values, strict=True):
        for got, value in zip(tower, wanted, strict=True):
            assert got.dtype == value.dtype and got.shape == value.shape
            np.testing.assert_array_equal(got, value)


@fast
@given(gradients, st.sampled_from([0, 4, 16, 1000]), limits)
def test_what_is_packed_follows_the_ranges_of_small_float32(parts, max_bytes, max_group):
    sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in parts]
    small = [i for i, (_, dtype) in enumerate(parts) if dtype == np.float32 and sizes[i] <= max_bytes]
    ranges, _ = extract_ranges(small, max_group)
    with tf.Graph().as_default():
        pairs = constants([np.zeros(shape, dtype) for shape, dtype in parts])
        packed, packing = pack_small_tensors([pairs], max_bytes, max_group)
    if not ranges:
        assert packing is None
        return
    assert [packing[f"0:{n}"].indices for n in range(len(ranges))] == [range(a, b + 1) for a, b in ranges]
    rest = [pair for i, pair in enumerate(pairs) if not any(a <= i <= b for a, b in ranges)]
    assert packed[0][len(ranges) :] == rest
    assert [var for _, var in packed[0][: len(ranges)]] == [PLACEHOLDER] * len(ranges)


def test_packing_stays_on_the_tower_s_device(graph):
    towers = []
    for tower in range(2):
        with tf.device(f"/device:GPU:{tower}"):
            towers.append(constants([np.float32([1, 2]), np.float32([[3]])]))
    packed, packing = pack_small_tensors(towers, 8, 2)
    unpacked = unpack_small_tensors(packed, packing)
    for tower in range(2):
        on = f"/device:GPU:{tower}"
        assert [packed[tower][0][0].device] + [grad.device for grad, _ in unpacked[tower]] == [on] * 3


def test_none_and_slices_are_left_where_they_are():
    slices = tf.IndexedSlices(tf.constant([1.0]), tf.constant([0]), tf.constant([4]))
    one = tf.constant([1.0])
    tower = [(one, "a"), (one, "b"), (None, "c"), (slices, "d"), (one, "e"), (one, "f")]
    packed, packing = pack_small_tensors([tower], 100, 10)
    assert [pair for pair in packed[0] if pair in tower[2:4]] == packed[0][2:] == tower[2:4]
    unpacked = unpack_small_tensors(packed, packing)[0]
    assert [var for _, var in unpacked] == list("abcdef") and unpacked[2:4] == tower[2:4]


def test_a_gradient_of_unknown_size_is_not_small():
    unknown = tf.compat.v1.placeholder(tf.float32, [None])
    assert pack_small_tensors([[(unknown, "a"), (unknown, "b")]], 100, 10)[1] is None


def test_changed_values_come_back_at_their_places():
    """What packing is for: the packed gradients go through a sum, and each comes back as its own sum."""
    values = [np.arange(n, dtype=np.float32) for n in (2, 30, 3, 1)]
    towers, packing = pack_small_tensors([constants(values), constants(values)], 12, 5)
    summed = [(tf.add(a, b), var) for (a, var), (b, _) in zip(*towers, strict=True)]
    fetched = run([[grad for grad, _ in tower] for tower in unpack_small_tensors([summed, summed], packing)])
    for tower in fetched:
        for got, value in zip(tower, values, strict=True):
            np.testing.assert_array_equal(got, 2 * value)


def test_one_range_and_back():
    packing = {}
    pairs = constants([np.float32([9]), np.float32([0, 1]), np.float32([[2], [3]])])
    flat = pack_range("x", packing, pairs, [1, 2])
    assert packing == {"x": GradPackTuple(range(1, 3), ["v1", "v2"], [tf.TensorShape([2]), tf.TensorShape([2, 1])])}
    pieces = unpack_grad_tuple([flat, None], packing["x"])
    assert [var for _, var in pieces] == ["v1", "v2"]
    whole, first, second = run([flat, pieces[0][0], pieces[1][0]])
    assert whole.tolist() == [0, 1, 2, 3] and first.tolist() == [0, 1] and second.tolist() == [[2], [3]]


def test_wrong_questions_are_refused():
    one, two = tf.constant([1.0]), tf.constant([1.0, 2.0])
    good = [(one, "a"), (one, "b")]
    with pytest.raises(ValueError, match="pack_range: expected a range within 0 to 1, got 1 to 2"):
        pack_range("k", {}, good, [1, 2])
    with pytest.raises(TypeError, match="pack_range: gradient 1 must be a tensor, got None"):
        pack_range("k", {}, [(one, "a"), (None, "b")], [0, 1])
    with pytest.raises(ValueError, match="pack_small_tensors: expected the gradients of at least one tower"):
        pack_small_tensors([], 100, 10)
    with pytest.raises(ValueError, match="tower 0 has 2 gradients and tower 1 has 1"):
        pack_small_tensors([good, good[:1]], 100, 10)
    for other in (None, two, tf.constant([1])):
        with pytest.raises(ValueError, match="gradient 1 of tower 1 .*expected a tensor like tower 0's: float32"):
            pack_small_tensors([good, [(one, "a"), (other, "b")]], 100, 10)
    packed, packing = pack_small_tensors([good, good], 100, 10)
    for wrong in (packed[:1], packed * 2, [[], []], []):
        with pytest.raises(ValueError, match="unpack_small_tensors: .*do not fit"):
            unpack_small_tensors(wrong, packing)
    with pytest.raises(ValueError, match="unpack_grad_tuple: expected a flat gradient of the sizes"):
        unpack_grad_tuple((one, None), packing["0:0"])
