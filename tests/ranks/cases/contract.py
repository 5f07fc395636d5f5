"""What every mode must do: after 100 steps, on any number of ranks, the weights of one process on the joined batch."""

import numpy as np
import tensorflow as tf

import hvdvars as hv

from . import case
from .tools import array, close, raised, same_everywhere

MODES = {
    "horovod": ("horovod", {}),
    "replicated-xring2": ("replicated", {"all_reduce_spec": "xring#2"}),
    "hybrid": ("distributed_all_reduce", {"all_reduce_spec": "pscpu#2:8:xring"}),
    "collective2": ("collective_all_reduce", {"all_reduce_spec": "collective#2"}),
    "owners": ("parameter_server", {}),
    "elements": ("parameter_server", {"placement": "elements"}),
    "masters": ("distributed_replicated", {}),
}
MORE = {
    "replicated": ("replicated", {}),
    "pscpu3": ("replicated", {"all_reduce_spec": "pscpu#3"}),
    "group": ("horovod", {"fusion": "group"}),
    "pack": ("horovod", {"fusion": "pack"}),
    "none": ("horovod", {"fusion": "none"}),
    "small": ("horovod", {"agg_small_grads_max_bytes": 64, "agg_small_grads_max_group": 2}),
    "repacking": ("horovod", {"gradient_repacking": 3}),
    "scope": ("collective_all_reduce", {"allreduce_merge_scope": 2}),
    "owners-scatter": ("parameter_server", {"reduce_to_owner": "reduce_scatter"}),
    "owners-all": ("parameter_server", {"reduce_to_owner": "all_reduce"}),
    "owners-none": ("parameter_server", {"fusion": "none"}),
    "elements-scatter": ("parameter_server", {"placement": "elements", "reduce_to_owner": "reduce_scatter"}),
    "elements-all": ("parameter_server", {"placement": "elements", "reduce_to_owner": "all_reduce"}),
    "elements-none": ("parameter_server", {"placement": "elements", "fusion": "none"}),
    "sparse": ("horovod", {"sparse": "sparse"}),
    "owners-sparse": ("parameter_server", {"sparse": "sparse"}),
    "masters-scatter": ("distributed_replicated", {"reduce_to_owner": "reduce_scatter", "sparse": "dense"}),
    "masters-all": ("distributed_replicated", {"reduce_to_owner": "all_reduce", "verify_every": 10}),
    "masters-none": ("distributed_replicated", {"fusion": "none", "sparse": "sparse"}),
    "psgpu": ("replicated", {"all_reduce_spec": "psgpu"}),
}
OPTIMIZERS = {
    "sgd": lambda: tf.keras.optimizers.SGD(0.1),
    "momentum": lambda: tf.keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: tf.keras.optimizers.Adam(0.01),
}
STEPS = 100
ROWS = 24  # a multiple of 1, 2, 3 and 4 ranks: equal shards, so that the mean of means is the mean


def everything(modes, optimizers=OPTIMIZERS):
    return {f"{m}-{o}": (*modes[m], o) for m in modes for o in optimizers}


class Net:
    """A small regression with all kinds of variables.

    Matrices, a vector, a scalar, one of float64, one without elements, one that is not trained, and a table whose
    gradients are slices with repeated rows.
    """

    def __init__(self, seed, dtype="float32"):
        random = np.random.RandomState(seed)

        def variable(name, *shape):
            return tf.Variable(tf.constant(random.randn(*shape) * 0.5, dtype), name=name)

        self.first, self.bias = variable("first", 6, 16), variable("bias", 16)
        self.last, self.scale = variable("last", 16, 3), variable("scale")
        self.empty, self.unused = variable("empty", 0, 4), variable("unused", 2)
        self.table = variable("table", 7, 16)
        self.shift = tf.Variable(tf.constant(random.randn(3), "float64"), name="shift")

    @property
    def variables(self):
        return [self.first, self.bias, self.unused, self.scale, self.table, self.empty, self.last, self.shift]

    def gradients(self, x, y, rows):
        with tf.GradientTape() as tape:
            hidden = tf.tanh(x @ self.first + self.bias + tf.gather(self.table, rows))
            guess = hidden @ self.last * self.scale + tf.cast(self.shift, x.dtype)
            loss = tf.reduce_mean(tf.square(guess - y)) + tf.reduce_sum(self.empty)
        return tape.gradient(loss, self.variables)


def batch(dtype="float32"):
    random = np.random.RandomState(7)
    rows = tf.constant([number * number % 5 for number in range(ROWS)])
    return tf.constant(random.randn(ROWS, 6), dtype), tf.constant(random.randn(ROWS, 3), dtype), rows


def one_process(world, optimizer):
    """The weights that one process reaches, worked out once for each optimizer."""
    key = f"one process {optimizer}"
    if key not in world.notes:
        net, updates = Net(seed=0), OPTIMIZERS[optimizer]()
        trained = [v for v in net.variables if v is not net.unused]
        updates.build(trained)
        whole = batch()

        @tf.function(autograph=False)
        def step():
            # As a tensor: of slices with repeated rows, Keras 3's Adam squares each row by itself.
            updates.apply([tf.convert_to_tensor(g) for g in net.gradients(*whole) if g is not None], trained)

        for _ in range(STEPS):
            step()
        world.notes[key] = [array(v) for v in net.variables]
    return world.notes[key]


def train(world, mode, options, optimizer, eager=False):
    net, updates, mgr = Net(seed=world.rank), OPTIMIZERS[optimizer](), hv.create(mode, **options)
    mgr.broadcast([net.variables, updates])
    shard = [part[world.rank :: world.size] for part in batch()]

    def step(*shard):
        mgr.apply_gradients(updates, net.gradients(*shard), net.variables)

    run = step if eager else tf.function(step, autograph=False)
    for _ in range(STEPS):
        run(*shard)
    mgr.flush()
    hv.verify(net.variables)
    return net, updates, mgr


def check(world, net, updates, optimizer, tolerance=2e-5):
    for variable, wanted in zip(net.variables, one_process(world, optimizer), strict=True):
        close(variable, wanted, f"{variable.name} after {STEPS} steps", tolerance)
    assert int(updates.iterations) == STEPS
    same_everywhere(world, int(updates.iterations), "iterations")


@case(params=everything(MODES), sizes=(1, 2, 3, 4), hows=("mpi",))
@case(params=everything(MODES, ("adam",)), sizes=(2,), hows=("gloo",))
def equals_one_process(world, chosen):
    mode, options, optimizer = chosen
    net, updates, _ = train(world, mode, options, optimizer)
    check(world, net, updates, optimizer)


@case(params=everything(MORE, ("adam",)), sizes=(3,), hows=("mpi",))
def equals_one_process_with_each_option(world, chosen):
    mode, options, optimizer = chosen
    net, updates, _ = train(world, mode, options, optimizer)
    check(world, net, updates, optimizer)


@case(params=everything(MODES), sizes=(1, 2, 3, 4), hows=("mpi",))
def equals_one_process_in_eager_steps(world, chosen):
    mode, options, optimizer = chosen
    net, updates, _ = train(world, mode, options, optimizer, eager=True)
    check(world, net, updates, optimizer)


@case(params={"alone": {}, "repacking": {"gradient_repacking": 3}}, sizes=(2, 4), hows=("mpi",))
def float16_on_the_wire_is_close(world, options):
    net, updates, _ = train(world, "replicated", {"compact_gradient_transfer": True, **options}, "sgd")
    check(world, net, updates, "sgd", tolerance=2e-3)


@case(params=["variables", "elements"], sizes=(2, 3, 4))
def slots_are_on_owners_only(world, placement):
    updates, mgr = tf.keras.optimizers.Adam(), hv.create("parameter_server", placement=placement)
    variables = [tf.Variable(tf.zeros([100, 10]), name=f"w{i}") for i in range(4)] + [tf.Variable(tf.zeros([13]))]
    mgr.apply_gradients(updates, [tf.ones_like(v) for v in variables], variables)
    ranks = world.meeting.gather_objects(mgr.report()["plans"][0]["optimizer_bytes"], "tests.slots")
    whole = 2 * 4 * (4 * 1000 + 13)  # Adam's two slots of float32
    assert sum(ranks) == whole, ranks
    if placement == "elements":
        assert max(ranks) <= whole / world.size * 1.05, ranks
    assert sum(mgr.report()["plans"][0]["owners"]) >= whole // 2


@case(params=["variables", "elements"], sizes=(1, 3, 4))
def a_rank_that_owns_nothing_keeps_count(world, placement):
    schedule = tf.keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 10.0])
    updates, mgr = tf.keras.optimizers.SGD(schedule), hv.create("parameter_server", placement=placement)
    variables = [tf.Variable([1.0, 2.0]), tf.Variable(3.0)]
    for _ in range(3):
        mgr.apply_gradients(updates, [tf.ones_like(v) for v in variables], variables)
    close(variables[0], np.array([1.0, 2.0]) - 12.0)
    close(variables[1], np.array(3.0 - 12.0))
    assert int(updates.iterations) == 3


@case(params=MODES, sizes=(2, 3), hows=("mpi",))
def the_sum_without_average(world, chosen):
    mode, options = chosen
    mgr, variable = hv.create(mode, average=False, **options), tf.Variable([0.0, 0.0])
    mgr.apply_gradients(tf.keras.optimizers.SGD(1.0), [tf.constant([1.0, world.rank])], [variable])
    close(variable, -np.array([world.size, sum(world.ranks)], float))


@case(params={n: MODES[n] for n in ("horovod", "owners", "elements", "masters")}, sizes=(1, 2, 3), hows=("mpi",))
def clips_to_the_norm_of_all_gradients(world, chosen):
    mode, options = chosen
    mgr = hv.create(mode, **options)
    variables = [tf.Variable(tf.zeros([3])), tf.Variable(tf.zeros([2, 2]))]
    grads = [tf.constant([3.0, 0.0, 0.0]), tf.constant([[0.0, 4.0], [0.0, 0.0]])]
    mgr.apply_gradients(tf.keras.optimizers.SGD(1.0, global_clipnorm=1.0), grads, variables)
    close(variables[0], np.array([-0.6, 0.0, 0.0]))
    close(variables[1], np.array([[0.0, -0.8], [0.0, 0.0]]))


@case(params=MODES, sizes=(1, 2), hows=("mpi",))
def clips_reduced_gradients_by_value(world, chosen):
    mode, options = chosen
    mgr, variable = hv.create(mode, gradient_clip=0.5, **options), tf.Variable(tf.zeros([3]))
    # The mean is clipped, not what is averaged: +-4 on two ranks cancel out.
    sign = 1.0 if world.rank % 2 == 0 else -1.0
    mgr.apply_gradients(tf.keras.optimizers.SGD(1.0), [tf.constant([4.0 * sign, 9.0, 0.25])], [variable])
    first = 0.0 if world.size == 2 else 0.5
    close(variable, -np.array([first, 0.5, 0.25]))


@case(params={n: MODES[n] for n in ("horovod", "owners")}, sizes=(1, 2, 3), hows=("mpi",))
def slots_stay_when_the_list_changes(world, chosen):
    mode, options = chosen

    def run(apply):
        variables = [tf.Variable(tf.ones([k]), name=f"v{k}") for k in (5, 4, 3, 2)]
        updates = tf.keras.optimizers.SGD(0.1, momentum=0.9)
        updates.build(variables)
        for step in range(6):
            used = variables if step % 2 == 0 else variables[1:]
            apply(updates, [tf.ones_like(v) * (step + 1.0) for v in used], used)
        return [array(v) for v in variables]

    mgr = hv.create(mode, **options)
    wanted = run(lambda updates, grads, variables: updates.apply(grads, variables))
    for value, one in zip(run(mgr.apply_gradients), wanted, strict=True):
        close(value, one)


@case(sizes=(2,), hows=("mpi",))
def what_cannot_be_cut_is_refused_everywhere(world):
    from keras.constraints import NonNeg

    mgr = hv.create("parameter_server", placement="elements")
    for updates in (tf.keras.optimizers.SGD(0.1, clipnorm=1.0), tf.keras.optimizers.Lamb(0.1)):
        variable = tf.Variable(tf.ones([3]))
        message = raised(ValueError, lambda u=updates, v=variable: mgr.apply_gradients(u, [tf.ones([3])], [v]))
        assert "placement='variables'" in message
        same_everywhere(world, message)
    dense = tf.keras.layers.Dense(2, kernel_constraint=NonNeg())
    dense.build((None, 3))
    grads = [tf.ones([3, 2]), tf.ones([2])]
    mgr.broadcast(dense.trainable_variables)
    sgd = tf.keras.optimizers.SGD(0.1)
    message = raised(ValueError, lambda: mgr.apply_gradients(sgd, grads, dense.trainable_variables))
    assert "constraint" in message
    same_everywhere(world, message)


@case(params=MODES, sizes=(2, 3), hows=("mpi",))
def optimizers_that_differ_are_refused(world, chosen):
    mode, options = chosen
    updates = tf.keras.optimizers.SGD(0.1 * (world.rank + 1), momentum=0.9)
    mgr = hv.create(mode, **options)
    message = raised(ValueError, lambda: mgr.apply_gradients(updates, [tf.ones([3])], [tf.Variable(tf.ones([3]))]))
    assert "optimizer is" in message and "learning_rate" in message
    same_everywhere(world, message)


@case(sizes=(2,), hows=("mpi",))
def counters_in_names_of_optimizers_do_not_matter(world):
    for _ in range(world.rank):
        tf.keras.optimizers.SGD(0.1)  # Keras counts what each rank has made
    inner = tf.keras.optimizers.SGD(0.1)
    updates = tf.keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=1.0)
    variable = tf.Variable([1.0])
    hv.create("horovod").apply_gradients(updates, [tf.constant([2.0])], [variable])
    close(variable, np.array([0.8]))


class _Descent:
    def apply(self, gradients, variables):
        for gradient, variable in zip(gradients, variables, strict=True):
            variable.assign_sub(0.5 * gradient)


@case(params={n: MODES[n] for n in ("horovod", "owners", "elements")}, sizes=(2,), hows=("mpi",))
def a_method_is_one_optimizer_however_often_it_is_named(world, chosen):
    mode, options = chosen
    mgr, rule, variable = hv.create(mode, **options), _Descent(), tf.Variable(tf.zeros([5]))
    for _ in range(3):
        mgr.apply_gradients(rule.apply, [tf.ones([5])], [variable])
    close(variable, np.full(5, -1.5))
