"""`variable_consistency="relaxed"`: each step applies the gradients of the step before; `flush` applies the last."""

import os
import tempfile

import tensorflow as tf

import hvdvars as hv

from . import case
from .contract import OPTIMIZERS, Net, batch
from .tools import array, close, horovod_operations, raised, same_everywhere

RELAXED = {"variable_consistency": "relaxed"}
MODES = {
    "horovod": ("horovod", {}),
    "replicated": ("replicated", {"all_reduce_spec": "pscpu#2"}),
    "collective2": ("collective_all_reduce", {"all_reduce_spec": "collective#2"}),
    "sparse": ("horovod", {"sparse": "sparse", "verify_every": 3}),
}
STEPS = 20
FLUSH_AT = 8
"""Training goes on after a flush, in the contract."""


def one_step_late(world, optimizer):
    """The weights and steps of one process that applies gradients one step late, zeros first."""
    key = f"one step late {optimizer}"
    if key not in world.notes:
        net, updates = Net(seed=0), OPTIMIZERS[optimizer]()
        trained = [v for v in net.variables if v is not net.unused]
        updates.build(trained)
        late = [tf.zeros_like(v) for v in trained]
        for number in range(STEPS):
            grads = [tf.convert_to_tensor(g) for g in net.gradients(*batch()) if g is not None]
            if late is not None:
                updates.apply(late, trained)
            late = grads
            if number == FLUSH_AT:
                updates.apply(late, trained)
                late = None
        updates.apply(late, trained)
        world.notes[key] = [array(v) for v in net.variables], int(updates.iterations)
    return world.notes[key]


def begin(world, mode, options, optimizer, eager=False):
    """A step over this rank's share of the batch, and what it trains."""
    net, updates, mgr = Net(seed=world.rank), OPTIMIZERS[optimizer](), hv.create(mode, **RELAXED, **options)
    mgr.broadcast([net.variables, updates])
    shard = [part[world.rank :: world.size] for part in batch()]

    def step(*shard):
        mgr.apply_gradients(updates, net.gradients(*shard), net.variables)

    run = step if eager else tf.function(step, autograph=False)
    return lambda: run(*shard), net, updates, mgr


def agrees(world, net, updates, optimizer, tolerance=2e-5):
    weights, steps = one_step_late(world, optimizer)
    for variable, wanted in zip(net.variables, weights, strict=True):
        close(variable, wanted, variable.name, tolerance)
    assert int(updates.iterations) == steps
    hv.verify(net.variables)


FEW = {f"{mode}-adam": (*MODES[mode], "adam") for mode in ("horovod", "sparse")}
EACH = {f"{mode}-adam": (*MODES[mode], "adam") for mode in MODES}
MORE = {f"horovod-{optimizer}": (*MODES["horovod"], optimizer) for optimizer in ("sgd", "momentum")}


@case(params=EACH | MORE, sizes=(2,), hows=("mpi",))
@case(params=FEW, sizes=(1, 3), gloo=(3,))
def equals_one_process_one_step_late(world, chosen):
    mode, options, optimizer = chosen
    run, net, updates, mgr = begin(world, mode, options, optimizer)
    for number in range(STEPS):
        run()
        assert mgr.report()["plans"][0]["pending_bytes"] > 0
        if number == FLUSH_AT:
            mgr.flush()
    mgr.flush()
    before = [array(v) for v in net.variables]
    mgr.flush()
    assert all((array(v) == b).all() for v, b in zip(net.variables, before, strict=True))
    assert mgr.report()["plans"][0]["pending_bytes"] == 0
    agrees(world, net, updates, optimizer)


COMBINED = {
    "repacking": {"gradient_repacking": 3},
    "compact": {"compact_gradient_transfer": True},
    "repacking-compact": {"gradient_repacking": 2, "compact_gradient_transfer": True},
    "repacking-compact-scaled": {
        "gradient_repacking": 2,
        "compact_gradient_transfer": True,
        "use_fp16": True,
        "fp16_enable_auto_loss_scale": True,
        "fp16_loss_scale": 1.0,
    },
}


@case(params=COMBINED, sizes=(2,), hows=("mpi",))
def equals_one_process_one_step_late_in_every_combination(world, options):
    run, net, updates, mgr = begin(world, "replicated", options, "sgd")
    for number in range(STEPS):
        run()
        if number == FLUSH_AT:
            mgr.flush()
    mgr.flush()
    agrees(world, net, updates, "sgd", 2e-3 if "compact_gradient_transfer" in options else 2e-5)


@case(sizes=(2,), hows=("mpi",))
def eager_steps_are_one_step_late_too(world):
    run, net, updates, mgr = begin(world, "horovod", {}, "momentum", eager=True)
    for number in range(STEPS):
        run()
        if number == FLUSH_AT:
            mgr.flush()
    mgr.flush()
    agrees(world, net, updates, "momentum")


@case(sizes=(1, 2), hows=("mpi",))
def a_restored_run_has_nothing_pending(world):
    """Saved at the flush and restored into a new manager, or into one with gradients of another run."""
    run, net, updates, mgr = begin(world, "horovod", {}, "momentum")
    for _ in range(FLUSH_AT + 1):
        run()
    made = tempfile.mkdtemp() if world.rank == 0 else None
    place = os.path.join(world.meeting.gather_objects(made, "tests.relaxed")[0], "run")
    hv.checkpoint.save(place, mgr, variables=net.variables, optimizer=updates)
    run()
    for again in (begin(world, "horovod", {}, "momentum"), (run, net, updates, mgr)):
        run, net, updates, mgr = again
        hv.checkpoint.restore(place, mgr, variables=net.variables, optimizer=updates)
        for _ in range(FLUSH_AT + 1, STEPS):
            run()
        mgr.flush()
        agrees(world, net, updates, "momentum")


@case(sizes=(2,), hows=("mpi",))
def the_collectives_do_not_wait_for_the_gradients(world):
    """In the graph of a step, no collective comes after what the step itself has worked out."""
    mgr, variable = hv.create("horovod", **RELAXED), tf.Variable(tf.ones([4]))
    sgd = tf.keras.optimizers.SGD(0.1)

    @tf.function(autograph=False)
    def step(x):
        mgr.apply_gradients(sgd, [tf.identity(x * variable, name="this_step")], [variable])

    concrete = step.get_concrete_function(tf.ones([4]))
    reduces = [op for op in concrete.graph.get_operations() if op.type.startswith("Horovod")]
    assert len(reduces) == len(horovod_operations(concrete)) == mgr.report()["plans"][0]["collectives_per_step"] == 1
    seen, todo = set(), list(reduces)
    while todo:
        op = todo.pop()
        if op.name not in seen:
            seen.add(op.name)
            todo += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    assert not any(name.startswith("this_step") for name in seen), seen


@case(sizes=(1, 2), hows=("mpi",))
def what_cannot_wait_is_refused(world):
    mgr, variables = hv.create("horovod", **RELAXED), [tf.Variable([1.0]), tf.Variable([2.0])]
    sgd = tf.keras.optimizers.SGD(0.1)
    mgr.apply_gradients(sgd, [tf.ones([1]), tf.ones([1])], variables)
    message = raised(ValueError, lambda: mgr.apply_gradients(sgd, [tf.ones([1]), None], variables))
    assert "pattern of None" in message and "'strong'" in message
    same_everywhere(world, message)
    scaled = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))
    message = raised(ValueError, lambda: mgr.apply_gradients(scaled, [tf.ones([1]), tf.ones([1])], variables))
    assert "loss scale" in message
    same_everywhere(world, message)
    other = tf.keras.optimizers.SGD(0.1)
    message = raised(ValueError, lambda: mgr.apply_gradients(other, [tf.ones([1]), tf.ones([1])], variables))
    assert "wait for another optimizer" in message
    same_everywhere(world, message)
    message = raised(RuntimeError, lambda: tf.function(mgr.flush)())
    assert "outside of tf.function" in message
    mgr.flush()
    close(variables[0], array(tf.constant([0.9])))
