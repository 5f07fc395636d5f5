"""What the methods for graphs of TensorFlow 1 refuse, on every rank alike; and towers that are not the same."""

import numpy as np
import tensorflow as tf

import hvdvars as hv

from . import case
from .tools import close, raised, same_everywhere
from .tower_graphs import Job, factor_of, one_process
from .tower_steps import sgd

v1 = tf.compat.v1

MODES = {
    "horovod": ("horovod", {}),
    "owners": ("parameter_server", {}),
    "masters": ("distributed_replicated", {}),
}


def make(mgr, towers=1, names=("first", "last"), shape=(2,)):
    """Each tower's variables."""
    mgr.use_resource_vars = True
    found = []
    for number in range(towers):
        with mgr.create_outer_variable_scope(number):
            found.append([v1.get_variable(name, shape, initializer=v1.ones_initializer()) for name in names])
    return found


def reduce(mgr, grads, variables):
    """What both methods give for device 0: collective in all modes."""
    rows = [list(zip(one, theirs, strict=True)) for one, theirs in zip(grads, variables, strict=True)]
    where, state = mgr.preprocess_device_grads(rows)
    return state, mgr.get_gradients_to_apply(0, state)


@case(params=MODES, sizes=(2,), hows=("mpi",))
def towers_of_different_number(world, chosen):
    """The mean is over all replicas, and so is the sum."""
    mode, given = chosen
    towers = world.rank + 1
    with tf.Graph().as_default():
        mgr = hv.create(mode, local_towers=towers, **given)
        first, replicas = sum(range(world.rank + 1)), sum(range(world.size + 1))
        job = Job(world, mgr, "adam", towers, first=first, replicas=replicas)
        job.start()
        for _ in range(100):
            job.session.run(job.train)
        values = job.weights()
        for name, wanted in one_process(world, "adam", factor_of(mode, replicas)).items():
            for (other, scope), value in values.items():
                if other == name:
                    close(np.asarray(value), np.asarray(wanted), f"{scope}/{name}", 5e-5)


@case(params=MODES, sizes=(2,), hows=("mpi",))
def gradients_that_are_missing(world, chosen):
    """None on all ranks leaves the variable alone, also where it is the largest; else it is refused, or zeros."""
    mode, given = chosen
    with tf.Graph().as_default():
        mgr = hv.create(mode, local_towers=2, **given)

        def build(number):
            ones = v1.ones_initializer()
            v1.get_variable("unused", [100], initializer=ones)
            return tf.reduce_sum(v1.get_variable("used", [3], initializer=ones)) * (world.rank + 1.0)

        job = Job(world, mgr, lambda: v1.train.AdamOptimizer(0.5), 2, build=build)
        job.start()
        for _ in range(2):
            job.session.run(job.train)
        job.session.run(job.before_save)
        values = {variable.name[:-2]: job.session.run(variable) for variable in v1.trainable_variables()}
        for name, value in values.items():
            close(value, np.zeros(3) if name.endswith("used") and "unused" not in name else np.ones(100), name, 1e-3)
        if world.rank == 0:
            names = {"used", "used/Adam", "used/Adam_1", "beta1_power", "beta2_power"}
            assert set(job.saved) - {"unused"} == names, sorted(job.saved)
            close(np.asarray(job.session.run(job.saved["beta1_power"])), np.asarray(0.9**3))
            close(job.session.run(job.saved["used/Adam"]), np.full(3, 0.19 * factor_of(mode, world.size * 2) * 1.5))
    missing = world.size - 1
    for extra in ({}, {"none_gradients": "zeros"}):
        with tf.Graph().as_default():
            mgr = hv.create(mode, **given, **extra)
            variables = make(mgr)
            grads = [tf.ones([2]), None if world.rank == missing else tf.ones([2])]
            if not extra:
                message = raised(ValueError, lambda: reduce(mgr, [grads], variables))  # noqa: B023
                assert "last: None on ranks [1]" in message, message
                same_everywhere(world, message)
                continue
            state, pairs = reduce(mgr, [grads], variables)
            with v1.Session() as session:
                session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
                got = session.run([gradient for gradient, _ in pairs])
            names = [variable.name for _, variable in pairs]
            for name, value in zip(names, got, strict=True):
                mean = 1.0 if "first" in name else (world.size - 1) / world.size
                close(value, np.full(2, mean * factor_of(mode, world.size)), name)
    with tf.Graph().as_default():
        mgr = hv.create(mode, local_towers=2, **given)
        variables = make(mgr, 2)
        message = raised(ValueError, lambda: reduce(mgr, [[tf.ones([2]), None], [tf.ones([2])] * 2], variables))
        assert "last is None in towers [0] only" in message and "none_gradients" in message
        same_everywhere(world, message)


@case(params=MODES, sizes=(2,), hows=("mpi",))
def slices_of_some_towers(world, chosen):
    """Rows in one tower and a tensor in the other are a tensor, on all ranks or on one."""
    mode, given = chosen
    for everywhere in (True, False):
        with tf.Graph().as_default():
            mgr = hv.create(mode, local_towers=2, **given)
            variables = make(mgr, 2, names=("table",), shape=(50, 2))
            rows = tf.IndexedSlices(tf.ones([3, 2]), tf.constant([1, 4, 1]), tf.constant([50, 2], tf.int64))
            other = tf.ones([50, 2]) if everywhere or world.rank == 0 else rows
            state, pairs = reduce(mgr, [[rows], [other]], variables)
            ops = []
            mgr.append_apply_gradients_ops(state, sgd(), pairs, ops)
            with v1.Session() as session:
                session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
                session.run(tf.group(*mgr.get_post_init_ops()))
                session.run(tf.group(*ops))
                value = session.run(variables[0][0])
            dense = world.size if everywhere else 1
            wanted = np.full([50, 2], float(dense))
            wanted[[1, 4]] += np.array([[2.0], [1.0]]) * (2 * world.size - dense)
            close(value, 1.0 - 0.125 * wanted / (2 * world.size) * factor_of(mode, 2 * world.size))


@case(params=MODES, sizes=(2,), hows=("mpi",))
def graphs_and_options_that_differ(world, chosen):
    mode, given = chosen
    last = world.rank == world.size - 1

    def refused(part, build):
        with tf.Graph().as_default():
            message = raised(ValueError, build)
        assert part in message, message
        same_everywhere(world, message)

    def shapes():
        mgr = hv.create(mode, **given)
        shape = (3,) if last else (2,)
        reduce(mgr, [[tf.ones(shape)] * 2], make(mgr, shape=shape))

    def counts():
        mgr = hv.create(mode, **given)
        names = ("first", "last")[: 1 if last else 2]
        reduce(mgr, [[tf.ones([2])] * len(names)], make(mgr, names=names))

    def chosen_options():
        mgr = hv.create(mode, fusion="none" if last else "auto", **given)
        reduce(mgr, [[tf.ones([2])] * 2], make(mgr))

    def scales():
        auto = {"use_fp16": True, "fp16_enable_auto_loss_scale": True} if last else {}
        mgr = hv.create(mode, **given, **auto)
        reduce(mgr, [[tf.ones([2])] * 2], make(mgr))

    def more():
        mgr = hv.create(mode, **given)
        make(mgr)
        if last:
            v1.get_variable("more", [2])
        mgr.get_post_init_ops()

    refused("[3] on rank 1", shapes)
    refused("rank 0 has 2 variables, rank 1 has 1", counts)
    refused("fusion is 'auto' on rank 0 and 'none' on rank 1", chosen_options)
    refused("enable_auto_loss_scale is False on rank 0 and True on rank 1", scales)
    refused("more: none on rank 0, float32 (2,) on rank 1", more)


@case(sizes=(1, 2), hows=("mpi",))
def calls_that_belong_elsewhere(world):
    variable = tf.Variable([1.0, 1.0])
    mgr = hv.create("horovod", local_towers=2)
    for call in (
        lambda: mgr.apply_gradients(lambda grads, variables: None, [tf.ones([2])], [variable]),
        lambda: mgr.reduce([tf.ones([2])], [variable]),
    ):
        assert "local_towers=2" in raised(ValueError, call)
    with tf.Graph().as_default():
        mgr = hv.create("horovod")
        (variables,) = make(mgr)
        grads = [tf.ones([2])] * 2
        for call in (lambda: mgr.apply_gradients(sgd(), grads, variables), lambda: mgr.reduce(grads, variables)):
            message = raised(RuntimeError, call)
            assert "preprocess_device_grads, get_gradients_to_apply and append_apply_gradients_ops" in message
        assert "get_post_init_ops" in raised(RuntimeError, lambda: mgr.broadcast(variables))
        assert "graph of TensorFlow 1" in raised(RuntimeError, lambda: hv.verify(variables))
        assert "get_pre_save_ops" in raised(
            RuntimeError, lambda: hv.checkpoint.save("nowhere", mgr, variables=variables)
        )
        assert "outside of graphs" in raised(RuntimeError, mgr.flush)
        hv.barrier()
        assert [plan["variables"] for plan in mgr.report()["plans"]] == []
        reduce(mgr, [grads], [variables])
        assert [plan["variables"] for plan in mgr.report()["plans"]] == [2]
        message = raised(ValueError, lambda: mgr.get_gradients_to_apply(1, [[]]))
        assert "device_num must be from 0 to 0, got 1" in message
        assert "device_grads is empty" in raised(ValueError, lambda: mgr.preprocess_device_grads([]))
        uneven = [list(zip(grads, variables, strict=True)), [(grads[0], variables[0])]]
        assert "tower 1 has 1 gradients" in raised(ValueError, lambda: mgr.preprocess_device_grads(uneven))
    with tf.Graph().as_default():
        mgr = hv.create("horovod", verify_every=2)
        assert "verify_every" in raised(ValueError, lambda: reduce(mgr, [[tf.ones([2])] * 2], make(mgr)))
    with tf.Graph().as_default():
        mgr = hv.create("parameter_server", placement="elements")
        message = raised(ValueError, lambda: reduce(mgr, [[tf.ones([2])] * 2], make(mgr)))
        assert "placement='variables'" in message
        fresh = hv.create("parameter_server")
        message = raised(RuntimeError, lambda: fresh.append_apply_gradients_ops([[]], sgd(), [], []))
        assert "get_gradients_to_apply first" in message
    hv.barrier()
