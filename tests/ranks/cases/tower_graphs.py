"""Graphs of TensorFlow 1, by the methods of tf_cnn_benchmarks: N ranks of T towers are one process on all rows."""

import numpy as np
import tensorflow as tf

import hvdvars as hv

from . import case
from .tools import close, same_everywhere

v1 = tf.compat.v1

MODES = {
    "horovod": ("horovod", {}),
    "replicated-xring2": ("replicated", {"all_reduce_spec": "xring#2"}),
    "hybrid": ("distributed_all_reduce", {"all_reduce_spec": "pscpu#2:8:xring"}),
    "collective2": ("collective_all_reduce", {"all_reduce_spec": "collective#2"}),
    "owners": ("parameter_server", {}),
    "masters": ("distributed_replicated", {}),
}
OPTIMIZERS = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: v1.train.MomentumOptimizer(0.05, 0.9),
    "adam": lambda: v1.train.AdamOptimizer(0.01),
}
STEPS = 100
ROWS = 24
WEIGHTS = ("first", "bias", "last", "scale", "table")
MEAN_MODES = ("parameter_server", "distributed_replicated")


def batch():
    random = np.random.RandomState(7)
    rows = np.array([number * number % 5 for number in range(ROWS)])
    return random.randn(ROWS, 6).astype("float32"), random.randn(ROWS, 3).astype("float32"), rows


def model(x, y, rows, seed, table=True):
    """The loss of a small regression; the variables are made in the scope that is open."""

    def variable(name, *shape):
        values = np.random.RandomState(seed + len(name)).randn(*shape) * 0.5
        return v1.get_variable(name, shape, tf.float32, v1.constant_initializer(values))

    first, bias, last = variable("first", 6, 16), variable("bias", 16), variable("last", 16, 3)
    scale, words = variable("scale"), variable("table", 7, 16)
    count = v1.get_variable("moving", [2], tf.float32, v1.constant_initializer(seed), trainable=False)
    v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, v1.assign_add(count, [1.0, 2.0]))
    hidden = tf.tanh(x @ first + bias + (tf.gather(words, rows) if table else 0.0))
    return tf.reduce_mean(tf.square(hidden @ last * scale - y))


def one_process(world, optimizer, factor):
    """The weights that one process reaches with the gradients of the joined batch times `factor`, by name."""
    values = everything_of_one_process(world, optimizer, factor, STEPS)
    return {name: values[name] for name in WEIGHTS}


def everything_of_one_process(world, optimizer, factor, steps):
    """The same after so many steps, with all slots and counters, and what a step adds to moving averages."""
    key = f"one process {optimizer} {factor} {steps} in a graph"
    if key not in world.notes:
        with tf.Graph().as_default():
            with v1.variable_scope("v0"):
                loss = model(*batch(), seed=0)
            variables = v1.trainable_variables()
            grads = [tf.convert_to_tensor(g) * factor for g in tf.gradients(loss, variables)]
            train = OPTIMIZERS[optimizer]().apply_gradients(zip(grads, variables, strict=True))
            updates = v1.get_collection(v1.GraphKeys.UPDATE_OPS)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                for _ in range(steps):
                    session.run([train, updates])
                found = {v.name[:-2].removeprefix("v0/"): session.run(v) for v in v1.global_variables()}
                world.notes[key] = found
    return world.notes[key]


def divided(gradient, params):
    """The gradient of a loss that was multiplied by the caller's loss scale, without it."""
    return gradient if params is None or gradient is None else gradient / tf.cast(params.loss_scale, gradient.dtype)


class Job:
    """A graph with `towers` towers of this rank, as tf_cnn_benchmarks builds it; to be used as the default graph."""

    def __init__(
        self,
        world,
        mgr,
        optimizer,
        towers,
        resources=True,
        params=None,
        scale=1.0,
        first=None,
        replicas=None,
        build=None,
    ):
        """`build(number)` gives a tower's loss, if it is not the model's on the rows of a replica: from `first` on."""
        self.mgr, self.graph = mgr, v1.get_default_graph()
        mgr.use_resource_vars = resources
        devices, losses, grads = mgr.get_devices(), [], []
        first, replicas = world.rank * towers if first is None else first, replicas or world.size * towers
        for number in range(towers):
            share = [part[first + number :: replicas] for part in batch()]
            with (
                v1.name_scope(f"tower_{number}"),
                v1.device(devices[number]),
                mgr.create_outer_variable_scope(number),
            ):
                loss = build(number) if build else model(*share, seed=world.rank + 10 * number)
                read = mgr.trainable_variables_on_device(number, number)
                written = mgr.trainable_variables_on_device(number, number, writable=True)
                pairs = zip(tf.gradients(loss * scale, read), written, strict=True)
                grads.append([(divided(gradient, params), variable) for gradient, variable in pairs])
                losses.append(loss)
        self.loss, ops = tf.add_n(losses) / towers, []
        where, state = mgr.preprocess_device_grads(grads)
        for number, device in enumerate(where):
            with v1.device(device):
                pairs = mgr.get_gradients_to_apply(number, state)
                opt = OPTIMIZERS[optimizer]() if isinstance(optimizer, str) else optimizer()
                mgr.append_apply_gradients_ops(state, opt, pairs, ops, params)
        self.train = tf.group(*ops)
        updates = v1.get_collection(v1.GraphKeys.UPDATE_OPS)
        self.updates = updates if mgr.each_tower_has_variables() else updates[:1]
        self.enqueue = [put for staged in getattr(mgr, "staging_vars_on_devices", []) for put, _ in staged.values()]
        self.before_save = tf.group(*mgr.get_pre_save_ops())
        self.saved = mgr.savable_variables()
        with tf.control_dependencies([v1.local_variables_initializer()]):
            self.local_init = tf.group(*mgr.get_post_init_ops())
        self.session = v1.Session(config=v1.ConfigProto(device_count={"CPU": towers}, allow_soft_placement=True))

    def start(self):
        self.session.run(v1.global_variables_initializer())
        self.ready()

    def ready(self):
        self.session.run(v1.local_variables_initializer())
        self.session.run(self.local_init)
        if self.enqueue:
            self.session.run(self.enqueue)

    def weights(self):
        """This rank's values of every tower, by name and tower."""
        found = {}
        for variable in [*v1.global_variables(), *v1.local_variables()]:
            scope, _, name = variable.name[:-2].partition("/")
            if scope.startswith("v") and name in WEIGHTS:
                found[name, scope] = self.session.run(variable)
        return found

    def check(self, world, wanted, tolerance=5e-5):
        values = self.weights()
        assert {name for name, _ in values} == set(wanted), sorted(values)
        for (name, scope), value in sorted(values.items()):
            close(np.asarray(value), np.asarray(wanted[name]), f"{scope}/{name}", tolerance)
            assert value.tobytes() == values[name, min(s for n, s in values if n == name)].tobytes()
        same_everywhere(world, {f"{k}": v.tobytes().hex() for k, v in values.items()}, "weights")


def everything(optimizers, towers=1, resources=True):
    more = ("" if towers == 1 else f"-{towers}-towers") + ("" if resources else "-ref")
    return {f"{m}-{o}{more}": (*MODES[m], o, towers, resources) for m in MODES for o in optimizers}


def factor_of(mode, replicas):
    return 1.0 if mode in MEAN_MODES else float(replicas)


@case(params=everything(OPTIMIZERS), sizes=(1, 2, 3, 4), hows=("mpi",))
@case(params=everything(("adam",), towers=2), sizes=(3,), hows=("mpi",))
@case(params=everything(("momentum",), towers=2, resources=False), sizes=(4,), hows=("mpi",))
@case(params=everything(("momentum",)), sizes=(2,), hows=("gloo",))
def equals_one_process(world, chosen):
    mode, options, optimizer, towers, resources = chosen
    with tf.Graph().as_default():
        mgr = hv.create(mode, local_towers=towers, **options)
        # Where gradients are summed, a rate for the mean would be too large for many replicas.
        scale = 1.0 / factor_of(mode, world.size * towers)
        job = Job(world, mgr, optimizer, towers, resources, scale=scale)
        job.start()
        for _ in range(STEPS):
            job.session.run(job.train)
        job.check(world, one_process(world, optimizer, 1.0))
