import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdvars.check import (
    check_aligned,
    check_mean,
    check_sequence,
    check_variables,
    dtype_of,
    name_of,
    shape_of,
)


def variable(shape=(2, 3), dtype=tf.float32, name="kernel"):
    return tf.Variable(tf.zeros(shape, dtype), name=name)


def rows(values, indices, dense_shape=None):
    shape = None if dense_shape is None else tf.constant(dense_shape)
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), shape)


@pytest.fixture(scope="module")
def dense():
    layer = keras.layers.Dense(3, name="head")
    layer.build((None, 2))
    return layer


def test_names(dense):
    assert name_of(variable()) == "kernel"
    assert name_of(dense.kernel) == "head/kernel"
    assert name_of(object()) == "<object>"


def test_dtypes_and_shapes(dense):
    assert (dtype_of(dense.kernel), shape_of(dense.kernel)) == (tf.float32, tf.TensorShape([2, 3]))
    assert dtype_of(variable(dtype=tf.bfloat16)) == tf.bfloat16
    assert shape_of(rows([[1.0]], [0], [4, 1])) == tf.TensorShape([4, 1])


def test_aligned_keeps_order_none_and_identity(dense):
    variables = (dense.kernel, dense.bias, variable((), tf.float64), variable((0, 4)))
    grads = [tf.ones([2, 3]), None, tf.constant(1.0, tf.float64), tf.zeros([0, 4])]
    checked, same = check_aligned("reduce", grads, variables)
    assert all(given is got for given, got in zip(grads, checked, strict=True))
    assert all(given is got for given, got in zip(variables, same, strict=True))
    assert check_aligned("reduce", [], []) == ([], [])


def test_arrays_and_numbers_become_tensors():
    checked, _ = check_aligned("reduce", [np.ones([2, 3], np.float32), 2], [variable(), variable((), tf.float16)])
    assert [value.dtype for value in checked] == [tf.float32, tf.float16]
    assert all(isinstance(value, tf.Tensor) for value in checked)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64, tf.int32, tf.int8, tf.bool, tf.complex64])
def test_any_dtype_that_matches(dtype):
    grad = tf.zeros([2, 3], dtype)
    assert check_aligned("reduce", [grad], [variable(dtype=dtype)])[0][0] is grad


def test_slices_that_match():
    table = variable((5, 3))
    for grad in (
        rows([[1.0] * 3], [4]),
        rows([[1.0] * 3] * 2, np.int64([0, 0]), [5, 3]),
        rows(np.zeros([0, 3], np.float32), np.int32([])),
    ):
        assert check_aligned("reduce", [grad], [table])[0][0] is grad
    assert check_aligned("reduce", [rows([1.0], [2])], [variable((5,))])
    plain = check_aligned("reduce", [tf.IndexedSlices([[1.0] * 3], [4], [5, 3])], [table])[0][0]
    assert all(isinstance(part, tf.Tensor) for part in (plain.values, plain.indices, plain.dense_shape))


def test_unknown_shapes_fit():
    table = variable((5, 3))

    @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec([None, None]), tf.TensorSpec([None], tf.int64)])
    def step(grad, values, indices):
        assert check_aligned("reduce", [grad], [table])[0][0] is grad
        return check_aligned("reduce", [tf.IndexedSlices(values, indices)], [table])[0][0].values

    assert step(tf.zeros([5, 3]), tf.ones([2, 3]), [0, 1]).shape == [2, 3]
    loose = tf.Variable(tf.zeros([2]), shape=tf.TensorShape(None))
    assert check_aligned("reduce", [tf.zeros([7])], [loose])


@pytest.mark.parametrize(
    ("grad", "error", "fragment"),
    [
        (tf.zeros([3, 2]), ValueError, "shape (2, 3), got (3, 2)"),
        (tf.zeros([2, 3, 1]), ValueError, "shape (2, 3)"),
        (tf.zeros([]), ValueError, "shape (2, 3), got ()"),
        (tf.zeros([2, 3], tf.float16), TypeError, "dtype float32, got float16; use tf.cast(grad, tf.float32)"),
        (np.zeros([2, 3]), TypeError, "got float64"),
        ("gradient", TypeError, "got 'gradient' (str)"),
        ((tf.zeros([2, 3]), 1), TypeError, "not as pairs"),
        (tf.sparse.from_dense([[1.0, 0.0]]), TypeError, "SparseTensor"),
        (tf.ragged.constant([[1.0], []]), TypeError, "RaggedTensor"),
        (rows([[1.0] * 2], [0]), ValueError, "expected values of shape (1, 3)"),
        (rows([[1.0] * 3], [0, 1]), ValueError, "expected values of shape (2, 3)"),
        (rows([[1.0] * 3], [0], [4, 3]), ValueError, "dense_shape must be its variable's shape (2, 3), got (4, 3)"),
        (rows([[1] * 3], [0]), TypeError, "got int32"),
        (rows([[1.0] * 3], [[0]]), TypeError, "indices must be a vector"),
        (rows([[1.0] * 3], np.int16([0])), TypeError, "int16"),
    ],
)
def test_refused(grad, error, fragment):
    with pytest.raises(error) as caught:
        check_aligned("reduce", [None, grad], [variable(name="other"), variable()])
    assert str(caught.value).startswith("reduce: grads[1] (kernel)") and fragment in str(caught.value)


def test_a_scalar_has_no_rows():
    with pytest.raises(ValueError, match="a scalar has no rows"):
        check_aligned("reduce", [rows([1.0], [0])], [variable(())])


def test_counts():
    with pytest.raises(ValueError, match="reduce: got 1 grads for 2 variables"):
        check_aligned("reduce", [None], [variable(), variable()])


def test_lists_of_variables():
    one, two = variable(name="one"), variable(name="two")
    assert check_variables("broadcast", (one, two)) == [one, two]
    with pytest.raises(ValueError, match=r"broadcast: variables\[2\] \(one\) is also variables\[0\]"):
        check_variables("broadcast", [one, two, one])
    with pytest.raises(TypeError, match=r"broadcast: variables\[1\] must be a variable"):
        check_variables("broadcast", [one, tf.zeros([2])])
    with pytest.raises(TypeError, match="not as pairs"):
        check_variables("apply_gradients", [(tf.zeros([2]), one)])


@pytest.mark.parametrize("value", ["ab", {1: 2}, {1}, zip([1], [2], strict=True), 3, None, tf.zeros([2])])
def test_what_is_no_list(value):
    with pytest.raises(TypeError, match=r"reduce: grads must be a list or a tuple.*list\(grads\)"):
        check_sequence("reduce", "grads", value)


def test_one_variable_is_no_list():
    with pytest.raises(TypeError, match=r"variables must be a list.*\[variables\]"):
        check_variables("broadcast", variable())


def test_means():
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.complex128):
        check_mean("reduce", "grads[0]", dtype)
    for dtype in (tf.int32, tf.bool, tf.string):
        with pytest.raises(TypeError, match=f"{dtype.name}.*average=False"):
            check_mean("reduce", "grads[0]", dtype)
