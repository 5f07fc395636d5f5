"""What a step in graphs of TensorFlow 1 does besides sums: late values or gradients, skipped steps, constants."""

import numpy as np
import tensorflow as tf

import hvdvars as hv
from hvdvars import graphscale, options, scaling

from . import case
from .tools import close, same_everywhere
from .tower_graphs import OPTIMIZERS, Job, batch, factor_of, model, one_process

v1 = tf.compat.v1

STEPS = 6


def sgd():
    return v1.train.GradientDescentOptimizer(0.125)


def values_of(job, name):
    """Every tower's values of a variable, masters too."""
    variables = [*v1.global_variables(), *v1.local_variables()]
    return [job.session.run(v) for v in variables if v.name.removesuffix(":0").endswith(f"/{name}")]


STAGED = {
    "resource": ({"resources": True}, 1),
    "ref": ({"resources": False}, 1),
    "towers": ({"resources": True}, 2),
    "ref-towers": ({"resources": False}, 2),
}


@case(params=STAGED, sizes=(2,), hows=("mpi",))
@case(params={name: STAGED[name] for name in ("ref-towers",)}, sizes=(1, 3), hows=("mpi",))
def staged_values_are_read_one_step_late(world, chosen):
    """One trained variable, so that most ranks own nothing, and one that the model itself updates."""
    given, towers = chosen
    replicas = world.size * towers
    with tf.Graph().as_default():
        mgr = hv.create("parameter_server", staged_vars=True, local_towers=towers)
        assert mgr.supports_staged_vars() and not mgr.each_tower_has_variables()
        updates, read = [], []

        def build(number):
            first = v1.constant_initializer([1.0, 2.0, 4.0])
            weight = v1.get_variable("weight", [3], tf.float32, first)
            read.append(weight)
            count = v1.get_variable("count", [2], tf.float32, v1.constant_initializer(8.0), trainable=False)
            assert count.name == "v/count:0" and count.shape == [2] and count.dtype == tf.float32
            if not number:
                updates.append(count.assign_sub((count - 4.0) * 0.5))
            aim = float(world.rank * towers + number)
            return tf.reduce_sum(tf.square(weight - aim)) / 2

        job = Job(world, mgr, sgd, towers, build=build, **given)
        for staged in mgr.staging_vars_on_devices:
            assert sorted(staged) == ["v/count", "v/weight"]
            for put, get in staged.values():
                assert put.type == "Stage" and get.op.type == "Unstage"
        assert len(mgr.staging_delta_ops) == 1
        job.start()
        job.session.run([job.enqueue, read, mgr.staging_delta_ops])
        weights, counts = [np.array([1.0, 2.0, 4.0])] * 2, [np.array([8.0, 8.0])] * 2
        deltas = [(counts[0] - 4.0) * 0.5]
        aim = np.mean(range(replicas))
        for number in range(STEPS):
            seen, *_ = job.session.run([read, job.train, updates, mgr.staging_delta_ops])
            for value in seen:
                close(np.asarray(value), weights[-2], f"what step {number} reads")
            weights.append(weights[-1] - 0.125 * (weights[-2] - aim))
            counts.append(counts[-1] - deltas[-1])
            deltas.append((counts[-3] - 4.0) * 0.5)
            close(np.asarray(job.session.run(v1.global_variables("v/weight")[0])), weights[-1], "weight")
            close(np.asarray(job.session.run(v1.global_variables("v/count")[0])), counts[-1], "count")


RELAXED = {
    "horovod": ("horovod", {}, 2, 1e-4),
    "replicated": ("replicated", {"all_reduce_spec": "xring#2"}, 1, 1e-4),
    "repacking": ("replicated", {"gradient_repacking": 2}, 2, 1e-4),
    "small": ("replicated", {"agg_small_grads_max_bytes": 100, "agg_small_grads_max_group": 2}, 1, 1e-4),
    "compact": ("horovod", {"compact_gradient_transfer": True}, 2, 2e-2),
    "compact-repacking": ("replicated", {"compact_gradient_transfer": True, "gradient_repacking": 3}, 1, 2e-2),
    "sparse": ("horovod", {"sparse": "sparse"}, 2, 1e-4),
    "collective": ("collective_all_reduce", {}, 1, 1e-4),
}
LATE_STEPS = 10


def one_process_late(world, factor):
    """The weights of one process that applies gradients one step late, zeros first."""
    key = f"late {factor} in a graph"
    if key not in world.notes:
        with tf.Graph().as_default(), v1.variable_scope("v0"):
            loss = model(*batch(), seed=0)
            variables = v1.trainable_variables()
            grads = [tf.convert_to_tensor(g) * factor for g in tf.gradients(loss, variables)]
            fed = [v1.placeholder(tf.float32, v.shape) for v in variables]
            train = OPTIMIZERS["adam"]().apply_gradients(zip(fed, variables, strict=True))
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                late = [np.zeros(v.shape) for v in variables]
                for _ in range(LATE_STEPS):
                    now = session.run(grads)
                    session.run(train, dict(zip(fed, late, strict=True)))
                    late = now
                world.notes[key] = {v.name[3:-2]: session.run(v) for v in variables}
    return world.notes[key]


@case(params=RELAXED, sizes=(2,), hows=("mpi",))
@case(params={name: RELAXED[name] for name in ("repacking", "sparse")}, sizes=(1, 3), hows=("mpi",))
def relaxed_gradients_are_one_step_late(world, chosen):
    mode, given, towers, tolerance = chosen
    with tf.Graph().as_default():
        mgr = hv.create(mode, variable_consistency="relaxed", local_towers=towers, **given)
        job = Job(world, mgr, "adam", towers, resources=towers == 1)
        job.start()
        job.ready()  # what waits is not more for it
        for _ in range(LATE_STEPS):
            job.session.run(job.train)
        wanted = one_process_late(world, factor_of(mode, world.size * towers))
        job.check(world, wanted, tolerance)


SCALED = {
    "replicated": ("replicated", {}, True),
    "hybrid-ref": ("distributed_all_reduce", {"all_reduce_spec": "pscpu:8:xring"}, False),
    "relaxed": ("horovod", {"variable_consistency": "relaxed"}, True),
    "relaxed-compact": ("replicated", {"variable_consistency": "relaxed", "compact_gradient_transfer": True}, True),
    "owners": ("parameter_server", {}, True),
    "owners-ref": ("parameter_server", {}, False),
    "staged": ("parameter_server", {"staged_vars": True}, True),
    "masters": ("distributed_replicated", {}, True),
    "independent": ("independent", {}, True),
}
EVERY_N, SCALE, SCALED_STEPS = 2, 64.0, 8
BAD = {1: np.inf, 5: np.nan}


@case(params=SCALED, sizes=(2,), hows=("mpi",))
@case(params={name: SCALED[name] for name in ("relaxed", "owners", "masters")}, sizes=(3,), hows=("mpi",))
def all_ranks_skip_the_same_step(world, chosen):
    """In two steps one gradient of the last rank's last tower is no number; all halve the scale."""
    mode, given, resources = chosen
    towers, alone = 2, mode == "independent"
    replicas = world.size * towers
    with tf.Graph().as_default():
        auto = {"use_fp16": True, "fp16_enable_auto_loss_scale": True}
        mgr = hv.create(mode, local_towers=towers, **auto, **given)
        fed = [v1.placeholder(tf.float32, [4]) for _ in range(towers)]
        resource = {"use_resource": resources, "trainable": False}
        scale = v1.get_variable("loss_scale", [], tf.float32, v1.constant_initializer(SCALE), **resource)
        steps = v1.get_variable("loss_scale_normal_steps", [], tf.int32, v1.constant_initializer(0), **resource)
        params = graphscale.AutoLossScaleParams(True, scale, steps, EVERY_N, world.rank == 0)

        def build(number):
            first, last = (v1.get_variable(name, [4], initializer=v1.constant_initializer(1.0)) for name in "ab")
            return tf.reduce_sum(first * fed[number]) + tf.reduce_sum(last * 2.0 * (world.rank + 1.0))

        job = Job(world, mgr, sgd, towers, resources, params, scale=scale, build=build)
        assert mgr.grad_has_inf_nan is not None
        job.start()
        late = "variable_consistency" in given
        state, gone = scaling.init(SCALE), 0.0
        if late:
            state = scaling.update(state, True, EVERY_N)
        factor = 1.0 if alone else factor_of(mode, replicas)
        for number in range(SCALED_STEPS + late):
            wrong = BAD.get(number, 0.0) if alone or world.rank == world.size - 1 else 0.0
            values = [number + 1.0 + world.rank * towers + tower for tower in range(towers)]
            feeds = [np.full([4], value) for value in values]
            feeds[0 if alone else -1][3] += wrong
            job.session.run(job.train, dict(zip(fed, feeds, strict=True)))
            if late and number == SCALED_STEPS:
                break  # the last gradients wait
            state = scaling.update(state, number not in BAD, EVERY_N)
            if number not in BAD:
                gone += values[0] if alone else number + 1.0 + np.mean(range(replicas))
        got = [float(job.session.run(scale)), int(job.session.run(steps))]
        assert got == [state.scale, state.good_steps], (got, state)
        close(np.asarray(values_of(job, "a")[0]), np.full([4], 1 - 0.125 * gone * factor), "a", 1e-3)
        if not alone:
            same_everywhere(world, got)
            same_everywhere(world, [sorted({v.tobytes().hex() for v in values_of(job, name)}) for name in "ab"])


CONSTANT = {
    "horovod": ("horovod", {"fusion": "none"}),
    "packed": ("horovod", {"fusion": "pack"}),
    "relaxed": ("horovod", {"fusion": "none", "variable_consistency": "relaxed"}),
    "shuffle": ("replicated", {"fusion": "none", "all_reduce_spec": "pscpu"}),
    "owners": ("parameter_server", {"fusion": "none"}),
    "scatter": ("parameter_server", {"fusion": "none", "reduce_to_owner": "reduce_scatter"}),
    "masters": ("distributed_replicated", {}),
}


@case(params=CONSTANT, sizes=(2,), hows=("mpi",))
@case(params={name: CONSTANT[name] for name in ("horovod", "owners")}, sizes=(4,), hows=("mpi",))
def gradients_that_are_constant_on_one_rank(world, chosen):
    """TensorFlow may neither work a collective out beforehand, nor join two of equal input, nor drop one."""
    mode, given = chosen
    with tf.Graph().as_default():
        mgr = hv.create(mode, **given)
        mgr.use_resource_vars = True
        fed = v1.placeholder(tf.float32, [2])
        with mgr.create_outer_variable_scope(0):
            ones = v1.constant_initializer(1.0)
            names = ("one", "two", "three")[: 3 if world.size < 4 else 2]
            variables = [v1.get_variable(name, [2], initializer=ones) for name in names]
        equal = tf.zeros([2]) if world.rank == 0 else tf.identity(fed)
        grads = [equal, equal, tf.constant([3.0, 3.0])][: len(names)]
        where, state = mgr.preprocess_device_grads([list(zip(grads, variables, strict=True))])
        pairs, ops = mgr.get_gradients_to_apply(0, state), []
        mgr.append_apply_gradients_ops(state, sgd(), pairs, ops)
        train = tf.group(*ops)
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            session.run(tf.group(*mgr.get_post_init_ops()))
            for _ in range(4):
                session.run(train, {fed: [1.0, 2.0]})
            steps = 4 - ("variable_consistency" in given)
            factor = steps * 0.125 * factor_of(mode, world.size)
            sums = np.array([1.0, 2.0]) * (world.size - 1) / world.size
            for variable, total in zip(variables, [sums, sums, np.array([3.0, 3.0])], strict=False):
                close(session.run(variable), 1.0 - factor * total, variable.name)


HIERARCHICAL = {f"{t}-{s or 'plain'}": (t, s) for t, s in ((2, None), (3, "pscpu#2"), (4, None))}


@case(params=HIERARCHICAL, sizes=(2,), hows=("mpi",))
def hierarchical_copies_are_sums_too(world, chosen):
    towers, spec = chosen
    with tf.Graph().as_default():
        mgr = hv.create("replicated", local_towers=towers, hierarchical_copy=True, all_reduce_spec=spec)
        job = Job(world, mgr, "adam", towers)
        job.start()
        for _ in range(100):
            job.session.run(job.train)
        job.check(world, one_process(world, "adam", float(world.size * towers)))


@case(params=("cached", "staged"), sizes=(2,), hows=("mpi",))
def classes_for_several_nodes(world, which):
    """What `create` picks on several nodes, made by hand on one."""
    with tf.Graph().as_default():
        if which == "cached":
            chosen = options.resolve("parameter_server", local_towers=2)
            mgr = hv.VariableMgrDistributedFetchFromPS(chosen)
            job = Job(world, mgr, "momentum", 2)
            job.start()
            for _ in range(100):
                job.session.run(job.train)
            job.check(world, one_process(world, "momentum", 1.0))
            return
        mgr = hv.VariableMgrDistributedFetchFromStagedPS(options.resolve("parameter_server", staged_vars=True))
        job = Job(world, mgr, sgd, 1, build=lambda number: tf.reduce_sum(v1.get_variable("w", [2])) * (world.rank + 1))
        assert sorted(mgr.staged_vars_on_cpu) == ["v/w"]
        job.start()
        before = values_of(job, "w")[0]
        for _ in range(3):
            job.session.run(job.train)
        close(values_of(job, "w")[0], before - 3 * 0.125 * (world.size + 1) / 2)


@case(params=("replicated", "parameter_server", "distributed_replicated"), sizes=(2,), hows=("mpi",))
def an_evaluation_model_reuses_the_variables(world, mode):
    with tf.Graph().as_default():
        mgr = hv.create(mode, local_towers=2)
        job = Job(world, mgr, "momentum", 2)
        known = len(v1.global_variables()) + len(v1.local_variables())
        with mgr.reuse_variables(), mgr.create_outer_variable_scope(0):
            loss = model(*batch(), seed=5)
        assert len(v1.global_variables()) + len(v1.local_variables()) == known
        job.start()
        losses = []
        for _ in range(5):
            losses.append(float(job.session.run(loss)))
            job.session.run(job.train)
        assert len(set(losses)) == 5, losses
        same_everywhere(world, losses)


@case(params=("float16", "bfloat16"), sizes=(2,), hows=("mpi",))
def copies_of_half_precision_have_exact_masters(world, dtype):
    """Updates that are lost in a half-precision variable count in the master, on whatever rank it is, and are saved."""
    with tf.Graph().as_default():
        mgr = hv.create("distributed_replicated", copy_dtype=dtype, local_towers=2)

        def build(number):
            ones = v1.ones_initializer()
            variables = [v1.get_variable(name, [n], dtype, ones) for name, n in (("big", 5), ("small", 3))]
            v1.get_variable("moving", [1], tf.int16, v1.ones_initializer(), trainable=False)
            return tf.add_n([tf.reduce_sum(v) for v in variables]) * tf.cast(2.0**-10 * (1 + world.rank), dtype)

        job = Job(world, mgr, sgd, 2, build=build)
        job.start()
        for _ in range(4):
            job.session.run(job.train)
        job.session.run(job.before_save)
        wanted = 1.0 - 4 * 0.125 * 1.5 * 2.0**-10
        if world.rank == 0:
            assert sorted(job.saved) == ["big", "moving", "small"]
            for name, size in (("big", 5), ("small", 3)):
                assert job.saved[name].dtype.base_dtype == tf.float32
                close(job.session.run(job.saved[name]), np.full([size], wanted), name, 1e-7)
        for name in ("big", "small"):
            copies = [value for value in values_of(job, name) if value.dtype == tf.as_dtype(dtype).as_numpy_dtype]
            assert len(copies) == 2
            for value in copies:
                assert (value == np.float32(wanted).astype(value.dtype)).all(), value
