"""Values that are the same everywhere: broadcast from rank 0, and the proof by `verify`."""

import keras
import numpy as np
import tensorflow as tf

import hvdvars as hv

from . import EVERYWHERE, case, widely
from .tools import array, data, raised, same_everywhere

DTYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
]
MANAGERS = {
    "horovod": ("horovod", {}),
    "replicated": ("replicated", {"all_reduce_spec": "pscpu#2"}),
    "collective": ("collective_all_reduce", {}),
    "owners": ("parameter_server", {}),
    "elements": ("parameter_server", {"placement": "elements"}),
}


def value(shape, dtype, rank):
    """Bits that depend on the rank and on each element, nan and infinities among them."""
    generator = np.random.default_rng([rank, len(shape), tf.as_dtype(dtype).as_datatype_enum])
    size = int(np.prod(shape, dtype=int)) * tf.as_dtype(dtype).size
    if dtype == "bool":
        return tf.constant(generator.integers(0, 2, shape).astype(bool))
    raw = generator.integers(0, 256, size, dtype=np.uint8).tobytes()
    return tf.constant(np.frombuffer(raw, tf.as_dtype(dtype).as_numpy_dtype).reshape(shape))


@case(params={name: MANAGERS[name] for name in ("horovod", "owners")}, hows=EVERYWHERE)
def broadcast_restores_every_byte(world, manager):
    mode, options = manager
    shapes = [(), (0, 2), (3, 4)]
    wanted = [value(shape, dtype, 0) for dtype in DTYPES for shape in shapes]
    variables = [tf.Variable(value(shape, dtype, world.rank)) for dtype in DTYPES for shape in shapes]
    hv.create(mode, **options).broadcast(variables)
    for variable, tensor in zip(variables, wanted, strict=True):
        assert data(variable) == data(tensor), f"{variable.dtype.name} {variable.shape}"
    hv.verify(variables)


def network(rank):
    """A small Keras 3 model whose weights depend on the rank, with state that is not trained."""
    keras.utils.set_random_seed(100 + rank)
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.get_layer(index=1).moving_mean.assign(np.full([4], rank + 1.0))
    return model


@widely(MANAGERS, {"owners": MANAGERS["owners"]})
def broadcast_takes_models_and_optimizers(world, manager):
    mode, options = manager
    mgr, model = hv.create(mode, **options), network(world.rank)
    optimizer = keras.optimizers.Adam(0.1 * (world.rank + 1))
    optimizer.iterations.assign(7 + world.rank)
    single = keras.Variable(np.float32(world.rank))
    mgr.broadcast([model, optimizer, single])
    same_everywhere(world, [array(weight).tolist() for weight in model.weights[:-1]], "weights")
    assert array(model.get_layer(index=1).moving_mean).tolist() == [1.0] * 4
    assert int(optimizer.iterations) == 7 and abs(float(optimizer.learning_rate) - 0.1) < 1e-6 and float(single) == 0
    mgr.broadcast(single)
    hv.verify([*model.trainable_variables, optimizer.iterations])


@case(params=["horovod", "replicated"])
def broadcast_takes_slots_where_all_ranks_have_them(world, mode):
    variable = tf.Variable([1.0, 2.0])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build([variable])
    optimizer.apply([tf.constant([world.rank + 1.0, 1.0])], [variable])
    hv.create(mode).broadcast([variable, optimizer])
    hv.verify([variable, *optimizer.variables])
    assert np.allclose(array(variable), [0.9, 1.9])


@case()
def what_cannot_be_broadcast_is_refused(world):
    mgr = hv.create("horovod")
    message = raised(TypeError, lambda: mgr.broadcast([tf.Variable(1.0), "weights"]))
    assert "broadcast" in message and "str" in message
    message = raised(TypeError, lambda: mgr.broadcast([tf.Variable("text", name="label")]))
    assert "string" in message and "label" in message


@case()
def independent_ranks_keep_their_own_values(world):
    variables = [tf.Variable([float(world.rank)]), tf.Variable(np.float32(world.rank))]
    optimizer = keras.optimizers.SGD(0.5)
    mgr = hv.create("independent")
    mgr.broadcast([*variables, optimizer])
    for _ in range(world.rank + 1):  # not even the number of steps is shared
        mgr.apply_gradients(optimizer, [tf.constant([2.0]), None], variables)
    assert array(variables[0]).tolist() == [world.rank - 1.0 * (world.rank + 1)]
    assert float(variables[1]) == world.rank and int(optimizer.iterations) == world.rank + 1
    (reduced,) = mgr.reduce([tf.constant([world.rank + 5.0])], variables[:1])
    assert array(reduced).tolist() == [world.rank + 5.0]
    if world.size > 1:
        raised(RuntimeError, lambda: hv.verify(variables))


@case(hows=EVERYWHERE)
def verify_accepts_equal_bits(world):
    equal = [tf.Variable(value((3,), dtype, 0)) for dtype in DTYPES]
    hv.verify([*equal, tf.Variable(float("nan")), tf.Variable("text"), tf.Variable(tf.zeros([0, 2]))])
    hv.verify([])


@case(sizes=(2, 3, 4))
def verify_names_variables_and_ranks(world):
    last = world.size - 1
    good = tf.Variable([1.0, 2.0], name="good")
    bad = tf.Variable([1.0, -0.0 if world.rank == last else 0.0], name="bad")
    worse = keras.Variable(np.float64(world.rank), name="worse")
    message = raised(RuntimeError, lambda: hv.verify([good, bad, worse]))
    assert f"2 of 3 variables are not equal on all {world.size} ranks" in message
    assert f"bad (2,): ranks {last} differ from rank 0" in message
    assert f"worse (): ranks {', '.join(map(str, range(1, world.size)))} differ from rank 0" in message
    assert "good" not in message
    same_everywhere(world, message, "the message")


@case(sizes=(2, 3, 4))
def verify_refuses_other_shapes_on_another_rank(world):
    variable = tf.Variable(tf.zeros([2 + world.rank % 2]), name="odd")
    message = raised(ValueError, lambda: hv.verify([variable]))
    assert "odd" in message and "[2] on rank 0 and [3] on rank 1" in message
    same_everywhere(world, message, "the message")


@case(sizes=(2, 3))
def verify_every_looks_in_time(world):
    """Ranks drift apart after step 2; the check at step 4 says so, on every rank, and names the variable."""
    good, bad = tf.Variable([1.0], name="good"), tf.Variable([1.0], name="bad")
    kinds = [tf.Variable(tf.ones([2], dtype), name=dtype) for dtype in ("float16", "bfloat16", "float64")]
    mgr = hv.create("horovod", verify_every=2)
    optimizer = keras.optimizers.SGD(0.1)
    variables = [good, bad, *kinds]

    @tf.function
    def step():
        mgr.apply_gradients(optimizer, [tf.ones_like(variable) for variable in variables], variables)

    step()
    step()
    bad.assign_add([world.rank * 1e-6])
    step()
    message = raised(tf.errors.InvalidArgumentError, step)
    assert "verify_every" in message and "bad" in message and "good" not in message


@case(sizes=(2, 4), params={name: MANAGERS[name] for name in ("horovod", "owners", "elements")})
def a_forgotten_broadcast_is_found_at_the_first_step(world, manager):
    mode, options = manager
    variables = [tf.Variable([1.0, 2.0], name="same"), tf.Variable([float(world.rank)], name="forgotten")]
    mgr, optimizer = hv.create(mode, **options), keras.optimizers.SGD(0.1)
    grads = [tf.ones([2]), tf.ones([1])]
    message = raised(RuntimeError, lambda: mgr.apply_gradients(optimizer, grads, variables))
    assert "forgotten" in message and "same" not in message and "mgr.broadcast(" in message
    same_everywhere(world, message, "the message")
    mgr.broadcast(variables)
    mgr.apply_gradients(optimizer, grads, variables)
    assert np.allclose(array(variables[1]), [-0.1])
    hv.verify(variables)


@case(sizes=(2,))
def a_forgotten_broadcast_is_found_also_after_a_reduction(world):
    variables = [tf.Variable([float(world.rank)], name="forgotten")]
    mgr, grads = hv.create("horovod"), [tf.ones([1])]
    mgr.reduce(grads, variables)
    message = raised(RuntimeError, lambda: mgr.apply_gradients(keras.optimizers.SGD(0.1), grads, variables))
    assert "forgotten" in message
