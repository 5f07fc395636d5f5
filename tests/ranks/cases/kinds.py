"""Optimizers of every kind: the ranks end where one optimizer ends that is given the mean gradients."""

import warnings

import keras
import numpy as np
import tensorflow as tf

import hvdvars as hv

from . import case
from .tools import array, close, raised, same_everywhere

v1 = tf.compat.v1.train
MANAGERS = {
    "horovod": ("horovod", {}),
    "owners": ("parameter_server", {}),
    "elements": ("parameter_server", {"placement": "elements"}),
}
MASTERS = {"masters": ("distributed_replicated", {})}
KERAS_3 = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01, clipvalue=0.5),
    "Adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.1),
    "Adamax": lambda: keras.optimizers.Adamax(0.1),
    "Nadam": lambda: keras.optimizers.Nadam(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5, centered=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "Lion": lambda: keras.optimizers.Lion(0.1),
    "norm": lambda: keras.optimizers.Adam(0.1, global_clipnorm=0.3),
}
V1 = {
    "GradientDescent": lambda: v1.GradientDescentOptimizer(0.1),
    "Momentum": lambda: v1.MomentumOptimizer(0.1, 0.9),
    "Adam": lambda: v1.AdamOptimizer(0.1),
    "RMSProp": lambda: v1.RMSPropOptimizer(0.1),
}
WHOLE = {
    "Lamb": lambda: keras.optimizers.Lamb(0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.3),
}
STEPS = 4
SHAPES = [(4, 3), (5,), (), (17,)]


def tables(kinds, managers=MANAGERS):
    return {f"{kind}-{manager}": (kinds[kind], managers[manager]) for kind in kinds for manager in managers}


def beginning():
    return [tf.Variable(tf.cast(tf.range(1, 1 + int(np.prod(s, dtype=int))), tf.float32)) for s in SHAPES[1:3]] + [
        tf.Variable(tf.reshape(tf.linspace(-1.0, 1.0, int(np.prod(s))), s)) for s in (SHAPES[0], SHAPES[3])
    ]


def pulls(variables, strength):
    """Gradients that pull each element to its place, `strength` times."""
    return [(tf.convert_to_tensor(variable) - 0.25) * strength for variable in variables]


def apply_locally(optimizer, grads, variables):
    if hasattr(optimizer, "apply_gradients"):
        optimizer.apply_gradients(zip(grads, variables, strict=True))
    else:
        optimizer(grads, variables)


def one_process(make, size):
    """Where one process ends, whose gradient is the mean of the ranks'."""
    variables, optimizer = beginning(), make()
    for _ in range(STEPS):
        apply_locally(optimizer, pulls(variables, (size + 1) / 2), variables)
    return variables


def check(world, make, manager, eager=False):
    mode, options = manager
    mgr, optimizer, variables = hv.create(mode, **options), make(), beginning()

    def step():
        mgr.apply_gradients(optimizer, pulls(variables, world.rank + 1.0), variables)

    run = step if eager else tf.function(step)
    for _ in range(STEPS):
        run()
    for variable, wanted in zip(variables, one_process(make, world.size), strict=True):
        close(variable, array(wanted), tolerance=1e-4)
    hv.verify(variables)
    counter = getattr(optimizer, "iterations", None)
    if counter is not None:
        assert int(counter) == STEPS
    same_everywhere(world, len(mgr.report()["plans"]), "the number of plans")


CUT = {name: MANAGERS[name] for name in ("owners", "elements")}


@case(params=tables(KERAS_3, CUT), sizes=(2,), hows=("mpi",))
@case(params=tables({name: KERAS_3[name] for name in ("Adam", "norm")}, CUT), sizes=(1, 4), hows=("mpi",))
@case(params=tables({"norm": KERAS_3["norm"]}, {"horovod": MANAGERS["horovod"]}), sizes=(2, 3))
def keras_3(world, chosen):
    check(world, *chosen)


@case(params=tables(WHOLE, {"horovod": MANAGERS["horovod"], "owners": MANAGERS["owners"]}), sizes=(2,), hows=("mpi",))
@case(params=tables({**WHOLE, "norm": KERAS_3["norm"]}, MASTERS), sizes=(2,), hows=("mpi",))
def keras_3_by_whole_variables(world, chosen):
    check(world, *chosen)


@case(params=WHOLE, sizes=(2,))
def what_looks_at_whole_variables_is_not_cut(world, make):
    mgr, variables = hv.create("parameter_server", placement="elements"), beginning()
    message = raised(ValueError, lambda: mgr.apply_gradients(make(), pulls(variables, 1.0), variables))
    assert "placement='variables'" in message and type(make()).__name__ in message


@case(params=tables({name: name for name in ("momentum", "adam", "legacy")}), sizes=(2,), hows=("mpi",))
@case(params=tables({name: name for name in ("momentum", "legacy")}, MASTERS), sizes=(2,), hows=("mpi",))
def keras_2(world, chosen):
    import tf_keras

    kinds = {
        "momentum": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9),
        "adam": lambda: tf_keras.optimizers.Adam(0.1),
        "legacy": lambda: tf_keras.optimizers.legacy.Adam(0.1),
    }
    name, manager = chosen
    check(world, kinds[name], manager)


@case(params=tables(V1, CUT), sizes=(2,), hows=("mpi",))
@case(params=tables({"Adam": V1["Adam"]}), sizes=(1, 3), hows=("mpi",))
@case(params=tables({"Momentum": V1["Momentum"]}, MASTERS), sizes=(2,), hows=("mpi",))
def tensorflow_1(world, chosen):
    check(world, *chosen, eager=True)


@case(params=tables({"eager": True, "graph": False}), sizes=(2, 3), gloo=(2,))
@case(params=tables({"eager": True}, MASTERS), sizes=(2,), hows=("mpi",))
def callables(world, chosen):
    eager, manager = chosen

    def descend(grads, variables):
        for grad, variable in zip(grads, variables, strict=True):
            variable.assign_sub(0.1 * grad)

    check(world, lambda: descend, manager, eager)


@case(sizes=(1, 2), hows=("mpi",))
def a_callable_made_anew_each_step_is_told(world):
    mgr, variable = hv.create("horovod"), tf.Variable([0.0])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(10):
            mgr.apply_gradients(lambda grads, variables: variables[0].assign_sub(grads[0]), [tf.ones([1])], [variable])
    close(variable, [-10.0])
    assert len([one for one in told if "anew each step" in str(one.message)]) == (1 if world.rank == 0 else 0)


@case(params=MANAGERS, sizes=(2, 3))
def what_is_no_optimizer_is_refused(world, manager):
    mode, options = manager
    mgr, variables = hv.create(mode, **options), beginning()
    message = raised(TypeError, lambda: mgr.apply_gradients("adam", pulls(variables, 1.0), variables))
    assert "apply_gradients" in message and "str" in message


@case(sizes=(2, 3))
def an_optimizer_built_for_all_variables_is_refused_by_elements(world):
    mgr, variables = hv.create("parameter_server", placement="elements"), beginning()
    optimizer = keras.optimizers.Adam()
    optimizer.build(variables)
    message = raised(ValueError, lambda: mgr.apply_gradients(optimizer, pulls(variables, 1.0), variables))
    assert "built for" in message


@case(params=MANAGERS, gloo=(3,))
@case(params=MASTERS, sizes=(2,), hows=("mpi",))
def keras_variables_and_schedules(world, manager):
    """Keras 3 variables are no `tf.Variable`; the learning rate of a schedule follows the steps on every rank."""
    mode, options = manager
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 2], [1.0, 0.5, 0.25])
    mgr, optimizer = hv.create(mode, **options), keras.optimizers.SGD(schedule)
    variables = [keras.Variable(np.zeros([3], "float32"), name="one"), keras.Variable(np.float32(0), name="two")]

    @tf.function
    def step(x):
        mgr.apply_gradients(optimizer, [tf.fill([3], x), x], variables)

    for _ in range(4):
        step(tf.constant(world.rank + 1.0))
    for variable in variables:
        close(array(variable.value), np.full(variable.shape, -(1 + 1 + 0.5 + 0.25) * (world.size + 1) / 2))
    hv.verify([*variables, optimizer.iterations])


@case(params=MANAGERS, gloo=(2,))
def a_model_learns_the_same_on_all_ranks(world, manager):
    """A real Keras model with shards of its own on each rank, in a plain tf.function."""
    mode, options = manager
    keras.utils.set_random_seed(world.rank)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    optimizer, mgr = keras.optimizers.Adam(0.01), hv.create(mode, **options)
    mgr.broadcast([model, optimizer])
    x = tf.random.stateless_normal([32, 4], [world.rank, 1])
    y = tf.reduce_sum(x, axis=1, keepdims=True)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        mgr.apply_gradients(optimizer, tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    losses = [float(step(x, y)) for _ in range(30)]
    assert losses[-1] < losses[0]
    hv.verify([*model.trainable_variables, optimizer.iterations])


@case(params={name: MANAGERS[name] for name in ("horovod", "owners")}, sizes=(1, 2, 3))
def an_embedding_is_updated_row_by_row(world, manager):
    """Slices with repeated rows, some of them on one rank only; the untouched rows keep their values."""
    mode, options = manager
    for sparse in ("auto", "sparse", "dense"):
        mgr, table = hv.create(mode, sparse=sparse, **options), tf.Variable(tf.ones([50, 2]))
        optimizer = keras.optimizers.SGD(1.0)
        rows = tf.constant([0, 0, world.rank + 1])

        @tf.function
        def step(rows, mgr=mgr, table=table, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, rows))
            grads = tape.gradient(loss, [table])
            assert isinstance(grads[0], tf.IndexedSlices)
            mgr.apply_gradients(optimizer, grads, [table])

        step(rows)
        wanted = np.ones([50, 2])
        wanted[0] -= 2
        for rank in world.ranks:
            wanted[rank + 1] -= 1 / world.size
        close(table, wanted, sparse)
        hv.verify([table])
