"""`staged_vars=True`: variables hold the owners' values of one step before; `flush` brings the newest."""

import os
import tempfile

import tensorflow as tf

import hvdvars as hv

from . import case
from .contract import OPTIMIZERS, Net, batch
from .tools import array, close, horovod_operations, raised, same_everywhere

STAGED = {"staged_vars": True}
MODES = {
    "variables": {},
    "elements": {"placement": "elements"},
    "sparse": {"sparse": "sparse", "verify_every": 3},
    "scatter-none": {"reduce_to_owner": "reduce_scatter", "fusion": "none"},
}
STEPS = 20
FLUSH_AT = 8
"""Training goes on after a flush."""


def one_step_late(world, optimizer):
    """The steps' losses and the weights of one process whose variables are copies of masters, one step late."""
    key = f"staged {optimizer}"
    if key not in world.notes:
        net, updates = Net(seed=0), OPTIMIZERS[optimizer]()
        trained = [v for v in net.variables if v is not net.unused]
        masters = [tf.Variable(v) for v in trained]
        updates.build(masters)
        seen = []
        for number in range(STEPS):
            seen.append(array(net.last))
            grads = [tf.convert_to_tensor(g) for g in net.gradients(*batch()) if g is not None]
            for copy, master in zip(trained, masters, strict=True):
                copy.assign(master)
            updates.apply(grads, masters)
            if number in (FLUSH_AT, STEPS - 1):
                for copy, master in zip(trained, masters, strict=True):
                    copy.assign(master)
        world.notes[key] = seen, [array(v) for v in net.variables]
    return world.notes[key]


def begin(world, options, optimizer, eager=False):
    """A step over this rank's share of the batch, and what it trains."""
    net, updates = Net(seed=world.rank), OPTIMIZERS[optimizer]()
    mgr = hv.create("parameter_server", **STAGED, **options)
    mgr.broadcast([net.variables, updates])
    shard = [part[world.rank :: world.size] for part in batch()]

    def step(*shard):
        mgr.apply_gradients(updates, net.gradients(*shard), net.variables)

    run = step if eager else tf.function(step, autograph=False)
    return lambda: run(*shard), net, updates, mgr


def agrees(world, net, updates, optimizer):
    _, weights = one_step_late(world, optimizer)
    for variable, wanted in zip(net.variables, weights, strict=True):
        close(variable, wanted, variable.name, 2e-5)
    assert int(updates.iterations) == STEPS
    hv.verify(net.variables)


def whole_run(world, options, optimizer, eager=False):
    run, net, updates, mgr = begin(world, options, optimizer, eager)
    seen, _ = one_step_late(world, optimizer)
    for number in range(STEPS):
        close(net.last, seen[number], f"what step {number} reads", 2e-5)
        run()
        if number == FLUSH_AT:
            mgr.flush()
    assert float(tf.norm(net.last - seen[-1])) > 0
    mgr.flush()
    before = [array(v) for v in net.variables]
    mgr.flush()
    assert all((array(v) == b).all() for v, b in zip(net.variables, before, strict=True))
    agrees(world, net, updates, optimizer)


EACH = {f"{mode}-adam": (MODES[mode], "adam") for mode in MODES}
MORE = {f"{mode}-{o}": (MODES[mode], o) for mode in ("variables", "elements") for o in ("sgd", "momentum")}
FEW = {f"{mode}-adam": (MODES[mode], "adam") for mode in ("variables", "elements")}


@case(params=EACH | MORE, sizes=(2,), hows=("mpi",))
@case(params=FEW, sizes=(1, 3, 4), gloo=(3,))
def equals_one_process_one_step_late(world, chosen):
    whole_run(world, *chosen)


@case(params={"variables": {}, "elements": MODES["elements"]}, sizes=(2,), hows=("mpi",))
def eager_steps_are_one_step_late_too(world, options):
    whole_run(world, options, "momentum", eager=True)


@case(params={"variables": {}, "elements": MODES["elements"]}, sizes=(2,), hows=("mpi",))
def publishing_does_not_wait_for_the_gradients(world, options):
    """In the graph of a step, what is gathered comes before what the step itself has worked out."""
    mgr, variable = hv.create("parameter_server", **STAGED, **options), tf.Variable(tf.ones([4]))
    sgd = tf.keras.optimizers.SGD(0.1)

    @tf.function(autograph=False)
    def step(x):
        mgr.apply_gradients(sgd, [tf.identity(x * variable, name="this_step")], [variable])

    concrete = step.get_concrete_function(tf.ones([4]))
    operations = concrete.graph.get_operations()
    (gather,) = [op for op in operations if op.type == "HorovodAllgather"]
    assert len(horovod_operations(concrete)) == mgr.report()["plans"][0]["collectives_per_step"] == 2
    seen, types, todo = set(), set(), [gather]
    while todo:
        op = todo.pop()
        if op.name not in seen:
            seen.add(op.name)
            types.add(op.type)
            todo += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    assert not any(name.startswith("this_step") for name in seen), seen
    assert not {"HorovodAlltoall", "AssignSubVariableOp"} & types, types


@case(params={"variables": {}, "elements": MODES["elements"]}, sizes=(1, 2), hows=("mpi",))
def values_from_outside(world, options):
    """A broadcast and a restore count; another assignment is overwritten by what is published next."""
    mgr, sgd = hv.create("parameter_server", **STAGED, **options), tf.keras.optimizers.SGD(1.0)
    variables = [tf.Variable([8.0, 8.0]), tf.Variable([4.0])]

    def step():
        mgr.apply_gradients(sgd, [tf.ones_like(v) for v in variables], variables)

    step()
    close(variables[0], [8.0, 8.0])
    step()
    close(variables[0], [7.0, 7.0])
    variables[0].assign([100.0, 100.0])
    step()
    close(variables[0], [6.0, 6.0])
    variables[0].assign([20.0 + world.rank] * 2)
    mgr.broadcast([variables[0]])
    close(variables[0], [20.0, 20.0])
    step()
    close(variables[0], [20.0, 20.0])
    mgr.flush()
    close(variables[0], [19.0, 19.0])
    close(variables[1], [0.0])  # what was not broadcast kept its master


@case(params={"variables": {}, "elements": MODES["elements"]}, sizes=(2,), hows=("mpi",))
def other_options_mean_what_they_do_without(world, options):
    """One step and a flush give what one step of parameter_server gives."""

    def run(mgr, norm):
        kept, rows, rest = tf.Variable([1.0, 2.0, 3.0]), tf.Variable(tf.ones([4, 2])), tf.Variable([5.0])
        slices = tf.IndexedSlices(tf.fill([2, 2], world.rank + 1.0), tf.constant([2, 2]), tf.constant([4, 2], tf.int64))
        grads = [tf.constant([0.1, 3.0, -4.0]), slices, None]
        sgd = tf.keras.optimizers.SGD(1.0, momentum=0.9, global_clipnorm=norm)
        mgr.apply_gradients(sgd, grads, [kept, rows, rest])
        mgr.flush()
        return [array(v) for v in (kept, rows, rest)]

    for extra in ({}, {"average": False}, {"gradient_clip": 0.5}, {"none_gradients": "zeros"}, {"use_fp16": True}):
        norm = None if extra else 1.0
        without = run(hv.create("parameter_server", **options, **extra), norm)
        staged = run(hv.create("parameter_server", **STAGED, **options, **extra), norm)
        for value, wanted in zip(staged, without, strict=True):
            close(value, wanted, str(extra))


@case(sizes=(1, 2), hows=("mpi",))
def a_restored_run_goes_on_as_after_a_flush(world):
    """Saved without a flush of the caller's, and restored into a new manager, and into one that has gone on."""
    run, net, updates, mgr = begin(world, {}, "momentum")
    for _ in range(FLUSH_AT + 1):
        run()
    made = tempfile.mkdtemp() if world.rank == 0 else None
    place = os.path.join(world.meeting.gather_objects(made, "tests.staged")[0], "run")
    hv.checkpoint.save(place, mgr, variables=net.variables, optimizer=updates)
    run()
    run()
    for again in (begin(world, MODES["elements"], "momentum"), (run, net, updates, mgr)):
        run, net, updates, mgr = again
        hv.checkpoint.restore(place, mgr, variables=net.variables, optimizer=updates)
        for _ in range(FLUSH_AT + 1, STEPS):
            run()
        mgr.flush()
        agrees(world, net, updates, "momentum")


@case(sizes=(2,), hows=("mpi",))
def lists_that_change(world):
    """Each variable is one update of its own behind, whatever list it comes in; pieces cannot be cut twice."""
    mgr, sgd = hv.create("parameter_server", **STAGED), tf.keras.optimizers.SGD(1.0, momentum=0.5)
    first, second = tf.Variable([1.0]), tf.Variable([2.0, 2.0])
    mgr.apply_gradients(sgd, [tf.ones([1]), tf.ones([2])], [first, second])
    mgr.apply_gradients(sgd, [None, tf.ones([2])], [first, second])
    mgr.apply_gradients(sgd, [tf.ones([2])], [second])
    close(first, [1.0])
    close(second, [2.0 - 1.0 - 1.5] * 2)
    mgr.flush()
    close(first, [0.0])
    close(second, [2.0 - 1.0 - 1.5 - 1.75] * 2)
    mgr = hv.create("parameter_server", placement="elements", **STAGED)
    sgd = tf.keras.optimizers.SGD(1.0)
    mgr.apply_gradients(sgd, [tf.ones([1]), tf.ones([2])], [first, second])
    other = tf.keras.optimizers.SGD(2.0)
    mgr.apply_gradients(other, [tf.ones([1]), tf.ones([2])], [first, second])  # the same masters
    mgr.flush()
    close(first, [-3.0])
    message = raised(ValueError, lambda: mgr.apply_gradients(sgd, [tf.ones([1]), None], [first, second]))
    assert "placement='variables'" in message
    same_everywhere(world, message)
