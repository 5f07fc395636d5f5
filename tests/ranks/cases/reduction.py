"""`mgr.reduce` in every mode: whole, right and bit-equal on every rank, or refused with the reason."""

import numpy as np
import tensorflow as tf

import hvdvars as hv

from . import EVERYWHERE, case, widely
from .tools import array, close, digest, raised, same_everywhere, sum_of_ranks

MODES = {
    "horovod": ("horovod", {}),
    "pack": ("horovod", {"fusion": "pack"}),
    "group": ("horovod", {"fusion": "group"}),
    "none": ("horovod", {"fusion": "none"}),
    "small": ("horovod", {"agg_small_grads_max_bytes": 40, "agg_small_grads_max_group": 3}),
    "repacking": ("replicated", {"gradient_repacking": 3}),
    "scope": ("replicated", {"allreduce_merge_scope": 2}),
    "xring2": ("replicated", {"all_reduce_spec": "xring#2"}),
    "pscpu3": ("replicated", {"all_reduce_spec": "pscpu#3"}),
    "psgpu": ("replicated", {"all_reduce_spec": "psgpu"}),
    "hybrid": ("distributed_all_reduce", {"all_reduce_spec": "pscpu#2:8:xring#2:100:collective"}),
    "collective2": ("collective_all_reduce", {"all_reduce_spec": "collective#2"}),
    "owners": ("parameter_server", {}),
    "elements": ("parameter_server", {"placement": "elements"}),
}
FEW = {name: MODES[name] for name in ("horovod", "pscpu3", "owners")}
FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
INTEGERS = ["uint8", "int8", "int16", "uint16", "int32", "int64"]
SHAPES = [(), (5,), (0, 2), (3, 4), (70,)]


def base(shape, dtype):
    """Small whole numbers that go through every dtype and every sum here exactly."""
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5 + 1
    return tf.cast(tf.constant(numbers * ((1 + 1j) if tf.as_dtype(dtype).is_complex else 1)), dtype)


def problem(dtypes):
    """Variables of every dtype, the first of every shape, and what rank 0 sends for each of them."""
    bases = [base(shape, dtypes[0]) for shape in SHAPES]
    bases += [base(shape, dtype) for dtype in dtypes[1:] for shape in [(), (5,)]]
    return [tf.Variable(tf.zeros_like(tensor)) for tensor in bases], bases


def times(tensor, factor):
    return tensor * tf.cast(factor, tensor.dtype)


def check_all(reduced, bases, factor):
    for result, tensor in zip(reduced, bases, strict=True):
        assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
        wanted = array(tensor).astype("complex128") * factor
        close(result, wanted, f"{tensor.dtype.name} {tensor.shape}", 1e-2 if tensor.dtype.size == 2 else 1e-6)


@widely(MODES, FEW)
def sums_and_means_of_every_dtype(world, mode):
    name, options = mode
    variables, bases = problem(["float32", "float64", "bfloat16", "float16", "complex64", "complex128"])
    mine = [times(tensor, world.rank + 1) for tensor in bases]
    mean = hv.create(name, **options)
    # What a traced gradient may look like: its first dimension unknown.
    loose = [tf.TensorSpec([None, *tensor.shape[1:]] if tensor.shape.rank else [], tensor.dtype) for tensor in mine]

    @tf.function(input_signature=[loose])
    def reduce(grads):
        return mean.reduce(grads, variables)

    check_all(reduce(mine), bases, (world.size + 1) / 2)
    variables, bases = problem(["int32", "uint8", "int8", "int16", "uint16", "int64", "float32", "bfloat16"])
    mine = [times(tensor, world.rank + 1) for tensor in bases]
    check_all(hv.create(name, average=False, **options).reduce(mine, variables), bases, sum_of_ranks(world.size))


@case(params=MODES, sizes=(3,), hows=("mpi",))
@case(params=FEW, sizes=(2, 4), gloo=(2,))
def the_same_bits_on_all_ranks(world, mode):
    name, options = mode
    generator = np.random.default_rng(world.rank)
    sizes = [1, 7, 64, 1000, 20_001, 33]
    grads = [tf.constant(generator.standard_normal(size).astype("float32")) for size in sizes]
    grads += [tf.cast(grads[3], "float64"), tf.cast(grads[2], "float16")]
    variables = [tf.Variable(tf.zeros_like(grad)) for grad in grads]
    reduced = hv.create(name, **options).reduce(grads, variables)
    same_everywhere(world, digest(*reduced), "the sums")


@case(params=FEW, hows=EVERYWHERE)
def an_integer_mean_is_refused(world, mode):
    name, options = mode
    mgr = hv.create(name, **options)
    for dtype in ("int32", "uint8", "bool"):
        variable = tf.Variable(tf.zeros([2], dtype), name="counts", trainable=False)
        message = raised(TypeError, lambda v=variable: mgr.reduce([tf.zeros_like(v)], [v]))
        assert "counts" in message and dtype in message and "average=False" in message


@case(params=FEW, sizes=(2,))
def no_bool_is_summed(world, mode):
    name, options = mode
    variable = tf.Variable([True, False], name="flags", trainable=False)
    mgr = hv.create(name, average=False, **options)
    message = raised(TypeError, lambda: mgr.reduce([tf.ones([2], bool)], [variable]))
    assert "bool" in message


@case(params=FEW, sizes=(2, 3), gloo=(2,))
def variables_that_are_not_trained_can_be_reduced(world, mode):
    """Statistics, for example: what counts is the gradient, not the flag."""
    name, options = mode
    variables = [tf.Variable([1.0], trainable=False), tf.Variable([1.0])]
    grads = [tf.constant([world.rank + 1.0]), tf.constant([2.0])]
    reduced = hv.create(name, average=False, **options).reduce(grads, variables)
    check_all(reduced, [tf.constant([1.0 * sum_of_ranks(world.size)]), tf.constant([2.0 * world.size])], 1)


@widely(MODES, FEW)
def none_everywhere_stays_none(world, mode):
    name, options = mode
    variables = [tf.Variable([1.0]), tf.Variable(tf.ones([2, 2])), tf.Variable(3.0)]
    mgr = hv.create(name, **options)
    reduced = mgr.reduce([None, tf.fill([2, 2], world.rank * 2.0), None], variables)
    assert reduced[0] is None and reduced[2] is None
    close(reduced[1], np.full([2, 2], world.size - 1.0))
    assert mgr.reduce([None] * 3, variables) == [None] * 3
    assert mgr.reduce([], []) == []


@case(sizes=(2, 3, 4), params=FEW)
def none_on_some_ranks_is_an_error_on_all(world, mode):
    name, options = mode
    variables = [tf.Variable([1.0], name="all"), tf.Variable([2.0], name="some")]
    grads = [tf.ones([1]), None if world.rank == 1 else tf.ones([1])]
    message = raised(ValueError, lambda: hv.create(name, **options).reduce(grads, variables))
    assert "some: None on ranks [1], a gradient on the others" in message and "none_gradients='zeros'" in message
    same_everywhere(world, message, "the message")


@widely(MODES, FEW, sizes=(2, 3, 4))
def none_on_some_ranks_can_count_as_zeros(world, mode):
    name, options = mode
    variables = [tf.Variable(tf.zeros([3, 2])), tf.Variable([2.0]), tf.Variable([[1.0]])]
    slices = tf.IndexedSlices(tf.fill([1, 2], float(world.rank)), tf.constant([1]), tf.constant([3, 2]))
    grads = [None if world.rank == 0 else slices, None if world.rank == 1 else tf.constant([world.rank + 1.0]), None]
    reduced = hv.create(name, none_gradients="zeros", average=False, **options).reduce(grads, variables)
    close(tf.convert_to_tensor(reduced[0]), [[0, 0], [world.size * (world.size - 1) / 2] * 2, [0, 0]])
    close(reduced[1], [sum_of_ranks(world.size) - 2.0])
    close(reduced[2], [[0]])


@case(sizes=(2, 3), params=FEW)
def what_counts_as_zeros_may_change_from_step_to_step(world, mode):
    """Another gradient is None each time, on one rank alone: no rank may think that this is something new."""
    name, options = mode
    variables = [tf.Variable(tf.zeros([2])), tf.Variable(tf.zeros([3]))]
    mgr = hv.create(name, none_gradients="zeros", average=False, **options)
    for number in range(4):
        grads = [tf.ones([2]), tf.ones([3])]
        missing = number % 3
        if world.rank == world.size - 1 and missing < 2:
            grads[missing] = None
        for index, reduced in enumerate(mgr.reduce(grads, variables)):
            close(reduced, np.full(reduced.shape, world.size - (index == missing)))


def table(world):
    """A table with rows 0..5, and this rank's slices: rows repeat, differ in number, and the last rank has none."""
    counts = [(3 * rank + 2) % 5 if rank < world.size - 1 or world.size == 1 else 0 for rank in world.ranks]
    indices = [np.arange(count) * (rank + 1) % 3 * 2 for rank, count in enumerate(counts)]
    rows = [np.arange(count * 3).reshape(count, 3) + 10.0 * rank for rank, count in enumerate(counts)]
    dense = np.zeros([6, 3])
    for one, two in zip(indices, rows, strict=True):
        np.add.at(dense, one, two)
    mine = tf.constant(rows[world.rank], "float32"), tf.constant(indices[world.rank], "int64")
    used = sorted({int(index) for one in indices for index in one})
    return tf.IndexedSlices(*mine, tf.constant([6, 3], "int64")), dense, used


@widely(MODES, FEW)
def slices_with_repeated_rows(world, mode):
    name, options = mode
    slices, dense, rows = table(world)
    variables = [tf.Variable(tf.zeros([6, 3])), tf.Variable([1.0])]
    ways = [("sparse", True), ("dense", True), ("sparse", False), ("auto", False)]
    # Rows cannot be cut into elements: that choice is refused.
    for way, average in ways if "placement" not in options else ways[1::2]:
        mgr = hv.create(name, sparse=way, average=average, **options)
        call = tf.function(mgr.reduce) if average else mgr.reduce
        reduced, beside = call([slices, tf.constant([world.rank + 1.0])], variables)
        assert isinstance(reduced, tf.IndexedSlices) == (way == "sparse") or way == "auto"
        factor = 1 / world.size if average else 1
        if isinstance(reduced, tf.IndexedSlices):
            assert array(reduced.indices).tolist() == rows
            close(reduced.values, dense[rows] * factor, way)
        close(tf.convert_to_tensor(reduced), dense * factor, way)
        close(beside, [sum_of_ranks(world.size) * factor])


@case(params=FEW, sizes=(1, 2, 3), gloo=(2,))
def slices_of_every_dtype(world, mode):
    name, options = mode
    mgr = hv.create(name, sparse="sparse", average=False, **options)
    variables, grads = [], []
    for dtype in (*INTEGERS, *FLOATS):
        variables.append(tf.Variable(tf.zeros([4, 2], dtype)))
        rows = tf.cast([[1, 2], [3, 4], [5, 6]], dtype)
        grads.append(tf.IndexedSlices(rows, tf.constant([world.rank % 2, 3, 3], "int32"), tf.constant([4, 2])))
    even, odd = (world.size + 1) // 2, world.size // 2
    wanted = np.array([[1, 2], [1, 2], [0, 0], [8, 10]]) * np.array([[even], [odd], [0], [world.size]])
    for variable, reduced in zip(variables, mgr.reduce(grads, variables), strict=True):
        assert isinstance(reduced, tf.IndexedSlices) and reduced.dtype == variable.dtype
        close(tf.convert_to_tensor(reduced), wanted, variable.dtype.name)


@case(sizes=(2, 3), params=FEW)
def slices_on_one_rank_and_a_tensor_on_another(world, mode):
    name, options = mode
    variable = tf.Variable(tf.zeros([3, 1]))
    slices = tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([2, 2]), tf.constant([3, 1]))
    grad = slices if world.rank == 0 else tf.ones([3, 1])
    (reduced,) = hv.create(name, average=False, **options).reduce([grad], [variable])
    others = world.size - 1.0
    close(tf.convert_to_tensor(reduced), [[others], [others], [others + 3]])


@case(hows=EVERYWHERE)
def the_sparser_form_is_chosen(world):
    """Few rows of a large table stay rows; most rows of a small one become a tensor."""
    large, small = tf.Variable(tf.zeros([10_000, 8])), tf.Variable(tf.zeros([4, 8]))
    rows = tf.IndexedSlices(tf.ones([3, 8]), tf.constant([1, 5, 9], "int64"), tf.constant([10_000, 8], "int64"))
    most = tf.IndexedSlices(tf.ones([4, 8]), tf.constant([0, 1, 2, 3], "int64"), tf.constant([4, 8], "int64"))
    reduced = hv.create("horovod").reduce([rows, most], [large, small])
    assert isinstance(reduced[0], tf.IndexedSlices)
    assert isinstance(reduced[1], tf.Tensor) or world.size == 1


@case(params=FEW, sizes=(1, 2), gloo=(2,))
def what_does_not_fit_is_refused(world, mode):
    name, options = mode
    mgr, variable = hv.create(name, **options), tf.Variable(tf.zeros([2, 3]), name="kernel")
    wrong = {
        "shape": (ValueError, [tf.zeros([3, 2])], [variable]),
        "dtype": (TypeError, [tf.zeros([2, 3], "float64")], [variable]),
        "grads for": (ValueError, [], [variable]),
        "also variables[0]": (ValueError, [None, None], [variable, variable]),
    }
    for words, (kind, grads, variables) in wrong.items():
        for call in (mgr.reduce, lambda g, v: mgr.apply_gradients(lambda grads, variables: None, g, v)):
            message = raised(kind, lambda call=call, g=grads, v=variables: call(g, v))
            assert words in message and ("reduce" in message or "apply_gradients" in message), message


@case(sizes=(2,), params=FEW)
def an_unknown_dimension_of_a_variable_is_refused(world, mode):
    name, options = mode
    variable = tf.Variable(tf.zeros([2, 3]), shape=[None, 3], name="growing")
    message = raised((TypeError, ValueError), lambda: hv.create(name, **options).reduce([tf.zeros([2, 3])], [variable]))
    assert "growing" in message and "must be known" in message, message


@case(sizes=(1, 2, 3))
def compact_transfer_neither_overflows_nor_touches_other_dtypes(world):
    """float16 ends at 65504: the sum of these is beyond, their mean is not; the sum comes back in float32."""
    variables = [tf.Variable(tf.zeros([2])), tf.Variable(tf.zeros([2], "float64")), tf.Variable(tf.zeros([2], "int32"))]
    grads = [tf.constant([60_000.0, 1.0]), tf.constant([1e300, 1.0], "float64"), tf.constant([7, 8])]
    total = hv.create("horovod", compact_gradient_transfer=True, average=False).reduce(grads, variables)
    close(total[0], np.array([60_000.0, 1.0]) * world.size, tolerance=2e-3)
    assert np.allclose(array(total[1]), np.array([1e300, 1.0]) * world.size)
    assert array(total[2]).tolist() == [7 * world.size, 8 * world.size]
    mean = hv.create("horovod", compact_gradient_transfer=True).reduce(grads[:2], variables[:2])
    close(mean[0], [60_000.0, 1.0], tolerance=2e-3)
    assert [t.dtype for t in mean] == [tf.float32, tf.float64] and np.allclose(array(mean[1]), [1e300, 1.0])
