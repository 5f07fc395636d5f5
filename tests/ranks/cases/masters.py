"""`distributed_replicated`: masters on owners, copies on every rank, which may be published in another dtype."""

import os
import tempfile

import numpy as np
import tensorflow as tf

import hvdvars as hv

from . import case
from .tools import array, close, raised, same_everywhere

HALF = {"float16": "float16", "bfloat16": "bfloat16"}
STEPS = 12
SHAPES = [("float32", (7, 5)), ("half", (33,)), ("float64", (3,)), ("float32", (40, 2)), ("half", (4, 4))]


def variables(half):
    random = np.random.default_rng(3)
    kinds = [(half if dtype == "half" else dtype, shape) for dtype, shape in SHAPES]
    return [
        tf.Variable(tf.cast(random.standard_normal(shape), kind), name=f"v{i}") for i, (kind, shape) in enumerate(kinds)
    ]


def gradients(step, rank, copies):
    """In the copies' dtypes, and small: half a copy's precision loses most of them. The second to last are rows."""
    random = np.random.default_rng([step, rank])
    grads = [tf.cast(random.standard_normal(v.shape) * 0.1, v.dtype) + 0.01 * v for v in copies]
    rows = tf.constant([1, 3, 1])
    grads[3] = tf.IndexedSlices(tf.gather(grads[3], rows), rows, tf.constant([40, 2], tf.int64))
    return grads


def adam():
    return tf.keras.optimizers.Adam(0.003)


def wide(dtype, half):
    return tf.float32 if dtype.name == half else dtype


def one_process(world, half):
    """Copies and masters of one process that does the same: casts at the same places."""
    copies, optimizer = variables(half), adam()
    masters = [tf.Variable(tf.cast(copy, wide(copy.dtype, half))) for copy in copies]
    optimizer.build(masters)
    for step in range(STEPS):
        ranks = [[tf.convert_to_tensor(g) for g in gradients(step, rank, copies)] for rank in world.ranks]
        means = [
            tf.add_n([tf.cast(g, master.dtype) for g in every]) / world.size
            for master, *every in zip(masters, *ranks, strict=True)
        ]
        optimizer.apply(means, masters)
        for copy, master in zip(copies, masters, strict=True):
            narrow = half if master.dtype == tf.float32 else master.dtype
            copy.assign(tf.cast(tf.cast(master, narrow), copy.dtype))
    return copies, masters


def held(mgr, trained):
    return {i: mgr.masters.held[id(v)] for i, v in enumerate(trained) if id(v) in mgr.masters.held}


def train(world, mgr, optimizer, trained, first, last):
    step = tf.function(lambda *g: mgr.apply_gradients(optimizer, g, trained), autograph=False)
    for number in range(first, last):
        step(*gradients(number, world.rank, trained))


@case(params=HALF, sizes=(2,), hows=("mpi",))
@case(params={"bfloat16": "bfloat16"}, sizes=(1, 3), gloo=(3,))
def masters_are_more_exact_than_copies(world, half):
    mgr, optimizer, trained = hv.create("distributed_replicated", copy_dtype=half), adam(), variables(half)
    train(world, mgr, optimizer, trained, 0, STEPS)
    copies, masters = one_process(world, half)
    rounding = 1e-3 if half == "float16" else 8e-3
    for copy, wanted in zip(trained, copies, strict=True):
        close(copy, wanted, copy.name, rounding)
    mine = held(mgr, trained)
    for index, master in mine.items():
        copy = trained[index]
        assert master.name == f"ps_var/v{index}:0" and master.dtype == wide(copy.dtype, half)
        # Copies of the reference may be rounded the other way, which the next gradient sees.
        close(master, masters[index], master.name, rounding / 10)
        same = array(tf.cast(copy, master.dtype)) == array(master)
        assert same.all() if master.dtype == tf.float64 else not same.all(), master.name
    everywhere = world.meeting.gather_objects(sorted(mine), "tests.masters")
    assert sorted(sum(everywhere, [])) == list(range(len(trained)))
    hv.verify(trained)
    plan = mgr.report()["plans"][0]
    assert plan["master_bytes"] == sum(int(tf.size(m)) * m.dtype.size for m in mine.values())
    # Two bytes for all but the three of float64, in buffers whose parts are rounded up.
    values = plan["bytes_per_step"] - (35 * 4 + 49 * 2 + 3 * 8)
    least = 2 * 164 + 8 * 3
    assert world.size == 1 or least <= values <= least + 64 * (3 * world.size + 4), values


@case(params={"bfloat16": "bfloat16"}, sizes=(2,), hows=("mpi",))
def a_checkpoint_keeps_the_masters(world, half):
    """Saved and restored into a new manager, and through a manager that has not taken a step: the same bits."""
    made = tempfile.mkdtemp() if world.rank == 0 else None
    place = os.path.join(world.meeting.gather_objects(made, "tests.masters")[0], "run")

    def begin():
        return hv.create("distributed_replicated", copy_dtype=half), adam(), variables(half)

    mgr, optimizer, trained = begin()
    train(world, mgr, optimizer, trained, 0, 4)
    hv.checkpoint.save(place, mgr, variables=trained, optimizer=optimizer)
    exact = {i: array(m) for i, m in held(mgr, trained).items()}
    train(world, mgr, optimizer, trained, 4, 6)
    wanted = [array(v) for v in trained]
    again, fresh, others = begin()
    hv.checkpoint.restore(place, again, variables=others, optimizer=fresh)
    whole = hv.checkpoint.save(f"{place}-again", again, variables=others, optimizer=fresh)
    with np.load(whole) as file:
        assert {key for key in file.files if key.startswith("master/")} == {f"master/{i}" for i in (0, 1, 3, 4)}
        for index in set(exact) - {2}:
            assert (file[f"master/{index}"] == exact[index]).all()
    for one in ((mgr, optimizer, trained), (again, fresh, others)):
        hv.checkpoint.restore(place, one[0], variables=one[2], optimizer=one[1])
        train(world, *one, 4, 6)
        for variable, value in zip(one[2], wanted, strict=True):
            assert (array(variable) == value).all(), variable.name
    # Into a mode without masters, and from there: the copies' values, of which old masters know nothing.
    plain, fresh, others = hv.create("horovod"), adam(), variables(half)
    hv.checkpoint.restore(place, plain, variables=others, optimizer=fresh)
    hv.checkpoint.save(place, plain, variables=others, optimizer=fresh)
    hv.checkpoint.restore(place, mgr, variables=trained, optimizer=optimizer)
    for index, master in held(mgr, trained).items():
        assert (array(master) == array(tf.cast(trained[index], master.dtype))).all()
        assert (array(trained[index]) == array(others[index])).all()


@case(sizes=(1, 2), hows=("mpi",))
def what_is_assigned_to_copies_counts(world):
    """Element by element where masters are more exact; the rest keeps its low bits."""
    mgr, sgd = hv.create("distributed_replicated", copy_dtype="float16"), tf.keras.optimizers.SGD(1.0)
    small, full = tf.Variable(tf.ones([3], tf.float16)), tf.Variable([5.0])
    tiny = tf.constant([2.0**-13] * 3, tf.float16)  # half of a quarter of what float16 tells apart from 1

    def step():
        mgr.apply_gradients(sgd, [-tiny, tf.constant([0.0])], [small, full])

    step()
    close(small, [1.0, 1.0, 1.0])
    small[1:2].assign(tf.constant([2.0], tf.float16))
    full.assign([np.pi])
    for _ in range(7):
        step()
    close(small, [1.0 + 2.0**-10, 2.0, 1.0 + 2.0**-10], tolerance=1e-9)
    close(full, array(tf.cast(tf.cast(np.pi, tf.float16), tf.float32)).reshape(1))
    for master in held(mgr, [small, full]).values():
        if master.shape[0] == 3:
            close(master, [1.0 + 2.0**-10, 2.0 + 7 * 2.0**-13, 1.0 + 2.0**-10], tolerance=1e-9)
        else:
            close(master, [np.pi])
    equal = hv.create("distributed_replicated")
    full.assign([1.0 + world.rank])
    equal.broadcast([full])
    equal.apply_gradients(tf.keras.optimizers.SGD(1.0), [tf.constant([0.5])], [full])
    close(full, [0.5])
    full.assign([10.0])
    equal.reduce([tf.constant([0.5])], [full])
    equal.apply_gradients(tf.keras.optimizers.SGD(1.0), [tf.constant([0.5])], [full])
    close(full, [9.5])
    same_everywhere(world, array(full).tolist())


BOTH = {"masters": ("distributed_replicated", {}), "staged": ("parameter_server", {"staged_vars": True})}


@case(params=BOTH, sizes=(2,), hows=("mpi",))
def masters_stand_in_for_their_variables(world, chosen):
    """Constraints and exceptions from weight decay are those of the variables."""
    mode, options = chosen
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(2, kernel_constraint="non_neg")])
    kernel, bias = model.trainable_variables
    mgr, updates = hv.create(mode, **options), tf.keras.optimizers.SGD(1.0, weight_decay=0.5)
    updates.exclude_from_weight_decay(var_list=[kernel], var_names=["dense"])  # the kernel, and not all of the layer
    kernel.assign(tf.ones([3, 2]))
    bias.assign(tf.ones([2]))
    mgr.apply_gradients(updates, [tf.constant([[0.25, 2.0]] * 3), tf.zeros([2])], [kernel, bias])
    mgr.flush()
    close(kernel, np.array([[0.75, 0.0]] * 3))
    close(bias, [0.5, 0.5])


@case(sizes=(1,), hows=("mpi",))
def a_device_that_is_not_there_is_refused(world):
    if tf.config.list_logical_devices("GPU"):
        return
    for mode, options in BOTH.values():
        message = raised(RuntimeError, lambda m=mode, o=options: hv.create(m, local_parameter_device="gpu", **o))
        assert "local_parameter_device='gpu'" in message and "sees no GPU" in message
