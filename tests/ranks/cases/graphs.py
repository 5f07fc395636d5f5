"""Reductions inside graphs of every shape, and eager calls beside them: names keep the ranks together."""

import keras
import tensorflow as tf

import hvdvars as hv

from . import case, widely
from .reduction import FEW
from .tools import array, close, raised, same_everywhere, sum_of_ranks

MOST = {**FEW, "none": ("horovod", {"fusion": "none"}), "elements": ("parameter_server", {"placement": "elements"})}
ONE = {"owners": MOST["owners"]}


def start(world, mode, **options):
    """A manager that sums, two variables, and a gradient that is rank + 1 everywhere."""
    name, more = mode
    mgr = hv.create(name, average=False, **more, **options)
    return mgr, [tf.Variable(tf.zeros([3])), tf.Variable(tf.zeros([2, 2]))], world.rank + 1.0


@widely(MOST, ONE)
def two_reductions_in_one_function(world, mode):
    mgr, (a, b), mine = start(world, mode)

    @tf.function
    def both(x):
        first = mgr.reduce([x, tf.fill([2, 2], x[0])], [a, b])
        second = mgr.reduce([x * 10], [a])
        again = mgr.reduce([x * 100], [a])
        return [*first, *second, *again]

    total = float(sum_of_ranks(world.size))
    for _ in range(2):
        results = both(tf.fill([3], mine))
        for result, factor in zip(results, (1, 1, 10, 100), strict=True):
            close(result, tf.fill(result.shape, total * factor))


@widely(MOST, ONE)
def reductions_in_loops(world, mode):
    mgr, (a, _), mine = start(world, mode)
    total = float(sum_of_ranks(world.size))

    @tf.function
    def one_after_the_other(x):
        for _ in tf.range(3):
            (x,) = mgr.reduce([x], [a])
        return x

    @tf.function
    def side_by_side(x):
        """No iteration needs another's result."""
        found = tf.zeros([3])
        for step in tf.range(5):
            found += mgr.reduce([x * tf.cast(step, tf.float32)], [a])[0]
        return found

    for _ in range(2):
        close(one_after_the_other(tf.fill([3], mine)), tf.fill([3], total * world.size**2))
        close(side_by_side(tf.fill([3], mine)), tf.fill([3], total * 10))


@widely(MOST, ONE)
def reductions_in_branches(world, mode):
    mgr, (a, b), mine = start(world, mode)

    @tf.function
    def branch(x, flag):
        return tf.cond(
            flag,
            lambda: tf.reduce_sum(mgr.reduce([x], [a])[0]),
            lambda: tf.reduce_sum(mgr.reduce([tf.fill([2, 2], x[0] * 2)], [b])[0]),
        )

    for flag, wanted in ((True, 3), (False, 8), (True, 3)):
        close(branch(tf.fill([3], mine), tf.constant(flag)), wanted * float(sum_of_ranks(world.size)))


@widely(MOST, ONE)
def training_loops_in_a_graph(world, mode):
    mgr, variables, mine = start(world, mode)
    optimizer = keras.optimizers.SGD(0.5, momentum=0.5)

    @tf.function
    def train(steps, x):
        for _ in tf.range(steps):
            mgr.apply_gradients(optimizer, [tf.fill(v.shape, x) for v in variables], variables)

    train(tf.constant(2), tf.constant(mine))
    train(tf.constant(1), tf.constant(mine))
    # Velocities 1, 1.5 and 1.75 times the step.
    for variable in variables:
        close(variable, tf.fill(variable.shape, -0.5 * 4.25 * sum_of_ranks(world.size)), tolerance=1e-5)
    hv.verify([*variables, optimizer.iterations])
    assert int(optimizer.iterations) == 3


@widely(MOST, ONE)
def a_rank_that_traces_again_alone(world, mode):
    """Also where all gradients are constants, which TensorFlow would like to reduce once and for all."""
    mgr, variables, mine = start(world, mode)
    optimizer = keras.optimizers.SGD(1.0)

    @tf.function
    def step(x, flag):
        constants = [tf.fill(v.shape, mine) for v in variables]
        reduced = mgr.reduce([constants[0] * x, constants[1]], variables)
        mgr.apply_gradients(optimizer, constants, variables)
        return reduced

    total = float(sum_of_ranks(world.size))
    for number, flag in enumerate([0, 0, 1 if world.rank == 0 else 0, 2 if world.rank == 1 else 0], start=1):
        for result in step(tf.constant(1.0), flag):
            close(result, tf.fill(result.shape, total))
        for variable in variables:
            close(variable, tf.fill(variable.shape, -total * number))


@case(params=FEW, sizes=(1, 2, 3), gloo=(2,))
def a_list_that_is_new_in_a_later_trace(world, mode):
    """TensorFlow lets nobody make variables in the second trace of a function."""
    mgr, (a, b), mine = start(world, mode)

    @tf.function
    def step(x, second):
        if second:
            return mgr.reduce([tf.fill([2, 2], x[0])], [b])[0]
        return mgr.reduce([x], [a])[0]

    for second in (False, True, False):
        result = step(tf.fill([3], mine), second)
        close(result, tf.fill(result.shape, float(sum_of_ranks(world.size))))


@widely(MOST, ONE)
def a_result_that_one_rank_alone_uses(world, mode):
    mgr, variables, mine = start(world, mode)

    @tf.function
    def step(x):
        reduced = mgr.reduce([x, tf.ones([2, 2])], variables)
        return reduced[0] if world.rank == world.size - 1 else x

    for _ in range(2):
        result = step(tf.fill([3], mine))
    close(result, tf.fill([3], float(sum_of_ranks(world.size)) if world.rank == world.size - 1 else mine))


@widely(MOST, ONE)
def gradients_that_are_constant_on_one_rank_alone(world, mode):
    mgr, variables, _ = start(world, mode)

    @tf.function
    def step(x):
        grads = [tf.fill([3], x), tf.fill([2, 2], x)]
        if world.rank == 0:
            grads[0] = tf.ones([3])
        elif world.rank == 1:
            grads[1] = tf.ones([2, 2])
        return mgr.reduce(grads, variables)

    for _ in range(2):
        for result in step(tf.constant(1.0)):
            close(result, tf.fill(result.shape, float(world.size)))


@case(params=FEW, sizes=(2, 3), gloo=(2,))
def functions_in_functions(world, mode):
    mgr, variables, mine = start(world, mode)
    optimizer = keras.optimizers.SGD(1.0)

    @tf.function
    def inner(x):
        mgr.apply_gradients(optimizer, [tf.fill(v.shape, x) for v in variables], variables)
        return mgr.reduce([tf.fill(v.shape, x) for v in variables], variables)

    @tf.function
    def outer(x):
        return [*inner(x), *inner(x * 2)]

    total = float(sum_of_ranks(world.size))
    for result, factor in zip(outer(tf.constant(mine)), (1, 1, 2, 2), strict=True):
        close(result, tf.fill(result.shape, total * factor))
    close(variables[0], tf.fill([3], -3 * total))


@case(params=FEW, sizes=(2, 3), gloo=(2,))
def two_managers(world, mode):
    one, (a, b), mine = start(world, mode)
    other = hv.create("horovod", fusion="none")

    @tf.function
    def both(x):
        return [*one.reduce([x], [a]), *other.reduce([x, tf.fill([2, 2], x[0])], [a, b])]

    total = float(sum_of_ranks(world.size))
    for call in (both, lambda x: [*one.reduce([x], [a]), *other.reduce([x, tf.fill([2, 2], x[0])], [a, b])]):
        sums = call(tf.fill([3], mine))
        for result, factor in zip(sums, (1, 1 / world.size, 1 / world.size), strict=True):
            close(result, tf.fill(result.shape, total * factor))


@widely(MOST, ONE)
def reductions_traced_in_another_order(world, mode):
    """After the first use the names alone bring the sums together, whatever a rank traces first."""
    mgr, (a, b), mine = start(world, mode)
    grads = tf.fill([3], mine), tf.fill([2, 2], mine * 10)
    mgr.reduce([grads[0]], [a])
    mgr.reduce([grads[1]], [b])

    @tf.function
    def swapped(x, y):
        results = {}
        for which in (0, 1) if world.rank % 2 == 0 else (1, 0):
            results[which] = mgr.reduce([(x, y)[which]], [(a, b)[which]])[0]
        return results[0], results[1]

    total = float(sum_of_ranks(world.size))
    for _ in range(2):
        first, second = swapped(*grads)
        close(first, tf.fill([3], total))
        close(second, tf.fill([2, 2], total * 10))


@widely(MOST, FEW, sizes=(2, 3))
def eager_calls_in_another_order_at_first(world, mode):
    mgr, variables, mine = start(world, mode)
    order = (0, 1) if world.rank == 0 else (1, 0)
    message = raised(
        ValueError,
        lambda: [mgr.reduce([tf.fill(variables[i].shape, mine)], [variables[i]]) for i in order],
    )
    assert "rank 0" in message and "rank 1" in message
    same_everywhere(world, message, "the message")


@widely(MOST, FEW, sizes=(2, 3))
def eager_calls_in_another_order_later(world, mode):
    """An error on every rank that names both calls: never a wrong sum, never a rank that waits for ever."""
    mgr, variables, mine = start(world, mode)
    optimizer = keras.optimizers.SGD(1.0)
    calls = [
        lambda: mgr.reduce([tf.fill([3], mine)], variables[:1]),
        lambda: mgr.reduce([tf.fill([2, 2], mine)], variables[1:]),
        lambda: mgr.apply_gradients(optimizer, [tf.fill([3], mine)], variables[:1]),
    ]
    for call in calls:
        call()
    before = array(variables[0])
    for one, two in ((0, 1), (0, 2), (2, 1)):
        message = raised((ValueError, RuntimeError), calls[one] if world.rank == 0 else calls[two])
        assert "rank 0" in message and "rank 1" in message
        same_everywhere(world, message, "the message")
    close(variables[0], before)
    close(calls[0]()[0], tf.fill([3], float(sum_of_ranks(world.size))))


@case(sizes=(2, 3))
def a_call_by_rank_0_alone_is_named(world):
    """The others are in the next eager call, whichever it is."""
    mgr, variables, mine = start(world, FEW["horovod"])
    grads = [tf.fill([3], mine)]
    mgr.reduce(grads, variables[:1])
    alone = {
        "verify": lambda: hv.verify(variables),
        "broadcast": lambda: mgr.broadcast(variables),
        "apply_gradients": lambda: mgr.apply_gradients(keras.optimizers.SGD(1.0), grads, variables[:1]),
    }
    for name, call in alone.items():
        next_call = call if world.rank == 0 else lambda: mgr.reduce(grads, variables[:1])
        message = raised((ValueError, RuntimeError), next_call)
        assert name in message and "reduce" in message and "rank 0" in message, message
        same_everywhere(world, message, "the message")
