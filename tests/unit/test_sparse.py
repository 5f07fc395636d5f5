import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdvars.sparse import average, choose, concat, sum_rows, to_dense

fast = settings(max_examples=60, deadline=None)
ROWS = 7


@st.composite
def slices(draw, dtypes=(np.float32, np.float64, np.int32, np.int64, np.complex64)):
    """Slices of small whole numbers, so that sums are exact in any order, and their dense sum by numpy."""
    dtype = draw(st.sampled_from(dtypes))
    index = draw(st.sampled_from([np.int32, np.int64]))
    row = draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)]))
    indices = np.array(draw(st.lists(st.integers(0, ROWS - 1), max_size=12)), index)
    seed = draw(st.integers(0, 2**16))
    values = np.random.default_rng(seed).integers(-50, 50, (len(indices), *row)).astype(dtype)
    dense = np.zeros((ROWS, *row), dtype)
    np.add.at(dense, indices, values)
    shape = draw(st.sampled_from([None, np.array(dense.shape, index)]))
    made = tf.IndexedSlices(tf.constant(values), tf.constant(indices), None if shape is None else tf.constant(shape))
    return made, dense


@fast
@given(slices())
def test_row_sums_are_those_of_numpy(case):
    given_slices, dense = case
    summed = sum_rows(given_slices)
    wanted = sorted(set(given_slices.indices.numpy().tolist()))
    assert summed.indices.numpy().tolist() == wanted
    assert summed.indices.dtype == given_slices.indices.dtype and summed.values.dtype == given_slices.values.dtype
    assert summed.dense_shape is given_slices.dense_shape
    np.testing.assert_array_equal(summed.values.numpy(), dense[wanted])


@fast
@given(slices())
def test_dense_is_that_of_numpy(case):
    given_slices, dense = case
    for made in (given_slices, sum_rows(given_slices)):
        np.testing.assert_array_equal(to_dense(made, dense.shape).numpy(), dense)
        np.testing.assert_array_equal(to_dense(made, tf.constant(dense.shape)).numpy(), dense)
        if made.dense_shape is not None:
            np.testing.assert_array_equal(to_dense(made).numpy(), dense)


@fast
@given(slices(), st.integers(0, 12))
def test_concat_of_the_pieces_is_the_whole(case, cut):
    whole, dense = case
    pieces = [
        tf.IndexedSlices(whole.values[:cut], whole.indices[:cut]),
        tf.IndexedSlices(whole.values[cut:], whole.indices[cut:], whole.dense_shape),
    ]
    joined = concat(pieces)
    np.testing.assert_array_equal(joined.values.numpy(), whole.values.numpy())
    np.testing.assert_array_equal(joined.indices.numpy(), whole.indices.numpy())
    assert joined.dense_shape is whole.dense_shape
    np.testing.assert_array_equal(to_dense(joined, dense.shape).numpy(), dense)


def test_concat_of_both_index_types():
    parts = [tf.IndexedSlices([1.0], tf.constant([2], kind)) for kind in (tf.int32, tf.int64)]
    assert concat(parts).indices.dtype == tf.int64
    assert concat(parts[:1]).indices.dtype == tf.int32
    with pytest.raises(ValueError, match="at least one"):
        concat([])


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_half_types_are_added_in_float32(dtype):
    # One after the other, 2048 + 1 stays 2048 in float16, and 256 + 1 stays 256 in bfloat16.
    rows = tf.constant([2048.0] + [1.0] * 64, dtype)
    many = tf.IndexedSlices(rows, [3] * 65)
    wanted = tf.cast(2048.0 + 64.0, dtype)
    assert sum_rows(many).values.numpy().tolist() == [wanted.numpy()]
    assert to_dense(many, [5]).dtype == dtype and to_dense(many, [5])[3] == wanted


def test_average():
    mean = average(tf.IndexedSlices(tf.constant([[2.0], [4.0]]), tf.constant([1, 1]), [3, 1]), 4)
    assert mean.values.numpy().tolist() == [[0.5], [1.0]] and mean.indices.numpy().tolist() == [1, 1]
    assert average(tf.IndexedSlices(tf.constant([2.0], tf.bfloat16), [1]), tf.constant(2)).values.dtype == tf.bfloat16
    with pytest.raises(TypeError, match="int32.*average=False"):
        average(tf.IndexedSlices(tf.constant([2]), [1]), 2)


def test_dense_needs_the_number_of_rows():
    for shape in (None, tf.TensorShape([None, 1]), tf.TensorShape(None)):
        with pytest.raises(ValueError, match="number of rows is unknown"):
            to_dense(tf.IndexedSlices([[1.0]], [0]), shape)


def test_in_a_graph_with_unknown_sizes():
    row = tf.TensorSpec([None, 2], tf.float32)
    index = tf.TensorSpec([None], tf.int64)

    @tf.function(input_signature=[row, index, tf.TensorSpec([2], tf.int64)])
    def both(values, indices, shape):
        made = tf.IndexedSlices(values, indices, shape)
        summed = sum_rows(made)
        assert to_dense(made, [5, 2]).shape == [5, 2]
        return summed.values, summed.indices, to_dense(made)

    values, indices, dense = both([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [4, 0, 4], [5, 2])
    assert indices.numpy().tolist() == [0, 4] and values.numpy().tolist() == [[3, 4], [6, 8]]
    assert dense.numpy().tolist() == [[3, 4], [0, 0], [0, 0], [0, 0], [6, 8]]
    values, indices, dense = both(np.zeros([0, 2], np.float32), np.zeros([0], np.int64), [5, 2])
    assert values.shape == [0, 2] and indices.shape == [0] and not dense.numpy().any()


@given(
    st.integers(0, 10**6), st.integers(0, 10**5), st.sampled_from([4, 8]), st.integers(0, 10**12), st.integers(2, 64)
)
def test_the_choice_moves_fewer_bytes(rows, row_bytes, index_bytes, dense_bytes, world):
    gathered = world * rows * (row_bytes + index_bytes)
    ring = 2 * dense_bytes * (world - 1) / world
    wanted = "sparse" if gathered < ring else "dense"
    if not np.isclose(gathered, ring):
        assert choose(rows, row_bytes, index_bytes, dense_bytes, world) == wanted


def test_choices():
    assert choose(1, 256, 8, 256 * 1000, 4) == "sparse"
    assert choose(1000, 256, 8, 256 * 1000, 4) == "dense"
    assert choose(0, 256, 8, 0, 2) == "dense"
    assert choose(10**9, 256, 8, 8, 1) == "sparse"
    for wrong in [(-1, 1, 1, 1, 2), (1, 1, 1, 1, 0)]:
        with pytest.raises(ValueError, match="sparse.choose"):
            choose(*wrong)
