import enum
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdvars import towers
from hvdvars.towers import (
    aggregate_gradients_using_copy,
    aggregate_gradients_using_copy_with_device_selection,
    aggregate_gradients_using_copy_with_variable_colocation,
    aggregate_indexed_slices_gradients,
    aggregate_single_gradient_using_copy,
    flatten_nested_indexed_slices,
    sum_all_towers,
    sum_hierarchically,
    sum_towers,
)

slow = settings(max_examples=40, deadline=None)
ROWS, WIDTH = 5, 2
GPUS = [f"/device:GPU:{index}" for index in range(9)]

Topology = enum.Enum("Topology", {"DGX1": "dgx1", "GCP_V100": "gcp_v100", "RING": "ring"})


class TextTopology(str, enum.Enum):
    DGX1 = "dgx1"


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as made:
        yield made


def run(tensors):
    settings_ = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    with tf.compat.v1.Session(config=settings_) as session:
        return session.run(tensors)


def rows_of(values, indices, index=tf.int32, shape=(ROWS, WIDTH)):
    values = tf.constant(values, tf.float32) if not isinstance(values, tf.IndexedSlices) else values
    return tf.IndexedSlices(values, tf.constant(indices, index), None if shape is None else tf.constant(shape))


def dense_of(gradient):
    """The numpy value of a gradient, dense; None is zeros."""
    if gradient is None:
        return np.zeros((ROWS, WIDTH), np.float32)
    if not isinstance(gradient, tf.IndexedSlices):
        return run(gradient)
    flat = flatten_nested_indexed_slices(gradient)
    values, indices = run([flat.values, flat.indices])
    dense = np.zeros((ROWS, WIDTH), np.float32)
    np.add.at(dense, indices, values)
    return dense


numbers = st.lists(st.integers(-9, 9), min_size=ROWS * WIDTH, max_size=ROWS * WIDTH)
# What one tower may have for one variable: whole numbers, so that sums are exact in any order.
kinds = st.one_of(
    st.none(),
    st.tuples(st.just("dense"), numbers),
    st.tuples(
        st.just("slices"),
        numbers,
        st.lists(st.integers(0, ROWS - 1), max_size=ROWS),
        st.sampled_from([tf.int32, tf.int64]),
        st.booleans(),
    ),
    st.tuples(
        st.just("nested"),
        numbers,
        st.lists(st.integers(0, ROWS - 1), min_size=ROWS, max_size=ROWS),
        st.sampled_from([tf.int32, tf.int64]),
        st.booleans(),
    ),
)


def gradient_of(kind):
    if kind is None:
        return None
    values = np.reshape(np.float32(kind[1]), (ROWS, WIDTH))
    if kind[0] == "dense":
        return tf.constant(values)
    _, _, indices, index, has_shape = kind
    shape = (ROWS, WIDTH) if has_shape else None
    if kind[0] == "nested":
        values, taken = rows_of(values[:3], indices[:3], index), indices
        return rows_of(values, taken, index, shape)
    return rows_of(values[: len(indices)], indices, index, shape)


@slow
@given(st.lists(kinds, max_size=5))
def test_the_sum_over_towers_is_that_of_numpy(parts):
    with tf.Graph().as_default():
        gradients = [gradient_of(part) for part in parts]
        total = sum_towers(gradients)
        forms = [part and part[0] for part in parts if part]
        if not forms:
            assert total is None
            return
        assert isinstance(total, tf.IndexedSlices) == ("dense" not in forms)
        np.testing.assert_array_equal(dense_of(total), sum(dense_of(gradient) for gradient in gradients))
        if isinstance(total, tf.IndexedSlices):
            dtypes = {part[3] for part in parts if part}
            assert total.indices.dtype == (dtypes.pop() if len(dtypes) == 1 else tf.int64)
            assert isinstance(total.values, tf.Tensor)


def test_one_gradient_is_the_sum_itself():
    for gradient in (tf.constant([1.0]), rows_of([[1, 2]], [3])):
        assert sum_towers([gradient]) is gradient and sum_towers([None, gradient, None]) is gradient
    assert sum_towers([None]) is sum_towers([]) is sum_towers([None, None]) is None


def test_slices_are_joined_in_order_and_keep_their_rows():
    total = sum_towers([rows_of([[1, 1]], [4], shape=None), rows_of([[2, 2], [3, 3]], [4, 0], tf.int64)])
    values, indices, shape = run([total.values, total.indices, total.dense_shape])
    assert values.tolist() == [[1, 1], [2, 2], [3, 3]] and indices.tolist() == [4, 4, 0] and shape.tolist() == [5, 2]
    assert indices.dtype == np.int64


def test_slices_beside_a_tensor_whose_shape_only_the_step_knows():
    dense = tf.compat.v1.placeholder_with_default(np.ones((ROWS, WIDTH), np.float32), [None, WIDTH])
    total = sum_towers([rows_of([[1, 2]], [3], shape=None), dense, None])
    assert run(total).tolist() == [[1, 1], [1, 1], [1, 1], [2, 3], [1, 1]]


def test_slices_of_slices_of_slices():
    inner = rows_of([[1, 2], [3, 4]], [1, 0], shape=(2, WIDTH))
    middle = rows_of(inner, [2, 0], tf.int64, (3, WIDTH))
    outer = rows_of(middle, [4, 0, 3])
    flat = flatten_nested_indexed_slices(outer)
    values, indices, shape = run([flat.values, flat.indices, flat.dense_shape])
    assert values.tolist() == [[1, 2], [3, 4]] and indices.tolist() == [4, 3] and shape.tolist() == [ROWS, WIDTH]


def test_every_variable_is_summed_on_a_device_in_turn():
    grads = [[tf.constant(float(10 * tower + i)) for i in range(3)] + [None] for tower in range(2)]
    total = sum_all_towers(grads, GPUS[:2])
    assert total[3] is None and [t.device for t in total[:3]] == [GPUS[0], GPUS[1], GPUS[0]]
    assert run(total[:3]) == [10, 12, 14]
    for nowhere in ([], [""]):
        assert [t.device for t in sum_all_towers(grads, nowhere)[:3]] == [""] * 3
    with tf.device(GPUS[5]):
        assert [t.device for t in sum_all_towers(grads, ["", GPUS[1]])[:3]] == [GPUS[5], GPUS[1], GPUS[5]]
    assert sum_all_towers(grads[:1], GPUS) == grads[0]
    assert sum_all_towers([[], []], GPUS) == []


def on_towers(count, variables=10):
    """Values 1, 2, 4 … by tower, so that a sum says which towers are in it; each tower on its own device."""
    made = []
    for tower in range(count):
        with tf.device(GPUS[tower]):
            made.append([tf.fill([i + 1], float(2**tower)) for i in range(variables)])
    return made


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("topology", ["dgx1", "DGX1", Topology.DGX1, TextTopology.DGX1])
def test_hierarchical_sums_are_of_all_towers_on_each_tower(count, topology):
    total = sum_hierarchically(on_towers(count), topology)
    assert [[t.device for t in row] for row in total] == [[GPUS[tower]] * 10 for tower in range(count)]
    for row in run(total):
        for i, got in enumerate(row):
            np.testing.assert_array_equal(got, np.full(i + 1, 2.0**count - 1))


@pytest.mark.parametrize("topology", ["gcp_v100", Topology.GCP_V100])
def test_gcp_v100(topology):
    for row in run(sum_hierarchically(on_towers(8), topology)):
        assert [got[0] for got in row] == [255.0] * 10
    assert sum_hierarchically([[None]], topology) == [[None]]
    for count in (2, 7, 9):
        with pytest.raises(ValueError, match=f"sum_hierarchically: 'gcp_v100' has 8 towers, got {count}"):
            sum_hierarchically(on_towers(count), topology)


@pytest.mark.parametrize(("topology", "count"), [("dgx1", count) for count in range(2, 10)] + [("gcp_v100", 8)])
def test_the_two_main_towers_are_in_different_halves(topology, count):
    mains = [towers._mains(topology, count)(index) for index in range(3 * count)]
    half = count // 2
    assert all((main < half) != (other < half) and max(main, other) < count for main, other in mains)
    if topology == "dgx1":
        assert [main for main, _ in mains] == [*range(count)] * 3
        assert count % 2 or all((main + half) % count == other for main, other in mains)
    else:
        assert mains[:5] == [(0, 5), (2, 7), (5, 0), (7, 2), (0, 5)]


def test_hierarchical_sums_of_none_and_slices():
    grads = [
        [None, rows_of([[1, 1]], [0]), None, tf.ones([ROWS, WIDTH])],
        [None, rows_of([[2, 2]], [1]), tf.ones([2]), rows_of([[1, 2]], [3])],
        [None, None, None, None],
    ]
    total = sum_hierarchically(grads)
    assert [row[0] for row in total] == [None] * 3
    for row in total:
        assert isinstance(row[1], tf.IndexedSlices)
        assert dense_of(row[1]).tolist() == [[1, 1], [2, 2], [0, 0], [0, 0], [0, 0]]
        assert run(row[2]).tolist() == [1, 1]
        assert dense_of(row[3])[3].tolist() == [2, 3]


@pytest.mark.parametrize("topology", ["ring", Topology.RING, None, 8])
def test_unknown_topologies_are_refused(topology):
    for count in (1, 8):
        with pytest.raises(ValueError, match="sum_hierarchically: expected the topology 'dgx1' or 'gcp_v100', got"):
            sum_hierarchically(on_towers(count), topology)


def pairs_of(values):
    return [[(tf.constant(v), f"v{tower}{i}") for i, v in enumerate(row)] for tower, row in enumerate(values)]


def test_aggregation_takes_the_first_tower_s_variable():
    grads = pairs_of([[[1.0, 2.0], 5.0], [[3.0, 6.0], 6.0], [[2.0, 1.0], 1.0]])
    for use_mean, wanted in ((False, [[6, 9], 12]), (True, [[2, 3], 4])):
        pairs, flag = aggregate_gradients_using_copy(grads, use_mean, False)
        assert flag is None and [var for _, var in pairs] == ["v00", "v01"]
        got = run([grad for grad, _ in pairs])
        np.testing.assert_allclose(got[0], wanted[0])
        np.testing.assert_allclose(got[1], wanted[1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [(0, 0), (1, 1)])
def test_the_flag_finds_what_is_not_finite_in_any_tower(bad, at):
    values = [[[1.0, 2.0], 5.0], [[3.0, 6.0], 6.0]]
    assert not run(aggregate_gradients_using_copy(pairs_of(values), True, True)[1])
    if at == (0, 0):
        values[0][0][1] = bad
    else:
        values[1][1] = bad
    flag = aggregate_gradients_using_copy(pairs_of(values), True, True)[1]
    assert flag.shape.rank == 0 and flag.dtype == tf.bool and run(flag)


def test_the_flag_finds_a_sum_beyond_its_dtype_and_bad_rows():
    large = [(tf.constant([60000.0], tf.float16), "v")] * 2
    assert run(aggregate_single_gradient_using_copy(large, True, True)[1])
    rows = [(rows_of([[1, np.inf]], [0]), "v"), (rows_of([[1, 1]], [0]), "v"), (None, "v")]
    assert run(aggregate_single_gradient_using_copy(rows, False, True)[1])
    assert not run(aggregate_single_gradient_using_copy(rows[1:], False, True)[1])
    assert not run(aggregate_single_gradient_using_copy([(None, "v")], True, True)[1])
    assert not run(aggregate_gradients_using_copy([[], []], True, True)[1])


def test_means_of_slices_and_of_towers_without_a_gradient():
    slices = [(rows_of([[1, 3]], [0]), "v"), (rows_of([[3, 5]], [0]), "w")]
    (mean, var), flag = aggregate_single_gradient_using_copy(slices, True, False)
    assert flag is None and var == "v" and isinstance(mean, tf.IndexedSlices)
    assert run(mean.values).tolist() == [[0.5, 1.5], [1.5, 2.5]]
    (mean, _), _ = aggregate_single_gradient_using_copy([(tf.constant(3.0), "v"), (None, "v")], True, False)
    assert run(mean) == 1.5
    assert aggregate_single_gradient_using_copy([(None, "v"), (None, "v")], True, False) == ((None, "v"), None)
    one = tf.constant([1, 2])
    assert aggregate_single_gradient_using_copy([(one, "v")], True, False)[0][0] is one
    with pytest.raises(TypeError, match="gradients of int32 have no exact mean"):
        aggregate_single_gradient_using_copy([(one, "v"), (one, "v")], True, False)
    both = aggregate_indexed_slices_gradients([slices[0][0], slices[1][0]])
    assert run(both.values).tolist() == [[1, 3], [3, 5]] and aggregate_indexed_slices_gradients([]) is None


def test_colocation_with_the_shared_variables():
    shared = []
    for device in (GPUS[3], GPUS[1]):
        with tf.device(device):
            shared.append(tf.compat.v1.get_variable(f"v{device[-1]}", [2], use_resource=device == GPUS[3]))
    grads = [[(tf.ones([2]), var) for var in shared] for _ in range(2)]
    pairs, flag = aggregate_gradients_using_copy_with_variable_colocation(grads, True, True)
    assert [grad.device for grad, _ in pairs] == [GPUS[3], GPUS[1]]
    assert all(var is wanted for (_, var), wanted in zip(pairs, shared, strict=True)) and not run(flag)
    other = [(tf.ones([2]), shared[0]), (tf.ones([2]), tf.compat.v1.get_variable("other", [2]))]
    with pytest.raises(ValueError, match="with_variable_colocation: variable 1 is .*v1.* in tower 0 and .*other.* in "):
        aggregate_gradients_using_copy_with_variable_colocation([grads[0], other], True, False)


@pytest.mark.parametrize(
    ("flag", "wanted"),
    [("gpu", [GPUS[0], GPUS[1], GPUS[0]]), ("cpu", ["/device:CPU:0"] * 3), ("", ["/device:CPU:0"] * 3)],
)
def test_devices_that_the_benchmark_names(flag, wanted):
    benchmark = SimpleNamespace(
        local_parameter_device_flag=flag, raw_devices=["/gpu:0", "/gpu:1"], param_server_device="/cpu:0"
    )
    grads = pairs_of([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    pairs, found = aggregate_gradients_using_copy_with_device_selection(benchmark, grads, False, False)
    assert found is None and [grad.device for grad, _ in pairs] == wanted
    assert run([grad for grad, _ in pairs]) == [5, 7, 9]


@pytest.mark.parametrize(
    "call",
    [
        sum_all_towers,
        sum_hierarchically,
        lambda grads: aggregate_gradients_using_copy(grads, True, True),
        lambda grads: aggregate_gradients_using_copy_with_variable_colocation(grads, True, True),
        lambda grads: aggregate_gradients_using_copy_with_device_selection(None, grads, True, True),
    ],
)
def test_towers_with_other_lists_are_refused(call):
    for grads, lengths in (([], r"\[\]"), ([[None], []], r"\[1, 0\]")):
        with pytest.raises(
            ValueError, match=f"expected one list of gradients for each tower, .* got lengths {lengths}"
        ):
            call(grads)
