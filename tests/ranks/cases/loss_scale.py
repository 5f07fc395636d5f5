"""The loss scale: gradients cross the wire scaled, and all ranks skip the same step."""

import os
import tempfile

import numpy as np
import tensorflow as tf

import hvdvars as hv
from hvdvars import scaling

from . import case
from .tools import array, close, raised, same_everywhere

AUTO = {
    "use_fp16": True,
    "fp16_loss_scale": 8.0,
    "fp16_enable_auto_loss_scale": True,
    "fp16_inc_loss_scale_every_n": 2,
}
MODES = {
    "horovod": ("horovod", {}),
    "sparse": ("replicated", {"sparse": "sparse"}),
    "collective": ("collective_all_reduce", {}),
    "relaxed": ("horovod", {"variable_consistency": "relaxed"}),
    "owners": ("parameter_server", {}),
    "elements": ("parameter_server", {"placement": "elements"}),
    "masters": ("distributed_replicated", {}),
    "masters-half": ("distributed_replicated", {"copy_dtype": "float16"}),
    "staged": ("parameter_server", {"staged_vars": True}),
    "staged-elements": ("parameter_server", {"staged_vars": True, "placement": "elements"}),
    "independent": ("independent", {}),
}
# Seven steps; in two of them the last rank's gradient of one variable is no number, or infinite.
BAD = {1: np.nan, 5: np.inf}
STEPS = 7


def variables():
    return [tf.Variable(tf.ones([n, 2]), name=f"w{n}") for n in (5, 3, 2)]


def gradient(step, rank):
    return float(step + 1) * (rank + 1.0)


def make_step(world, mgr, optimizer, trained, everywhere):
    """One step, by its number, that scales as a user does."""
    bad = world.size - 1

    @tf.function(autograph=False)
    def step(value, wrong):
        scale = tf.cast(mgr.loss_scale, tf.float32)
        grads = [tf.fill(v.shape, value * scale) for v in trained]
        rows = tf.constant([1, 0])
        grads[1] = tf.IndexedSlices(tf.fill([2, 2], value * scale) + wrong, rows, tf.constant([3, 2], tf.int64))
        mgr.apply_gradients(optimizer, grads, trained)

    def run(number):
        hit = everywhere or world.rank == bad
        step(tf.constant(gradient(number, world.rank)), tf.constant(BAD.get(number, 0.0) if hit else 0.0, tf.float32))

    return run


def expected(world, mode, relaxed):
    """Values of full and half-used variables, applied steps, and the scale."""
    state, total, applied = scaling.init(AUTO["fp16_loss_scale"]), 0.0, 0
    if relaxed:
        state, applied = scaling.update(state, True, 2), 1
    ranks = [world.rank] if mode == "independent" else world.ranks
    for number in range(STEPS):
        finite = number not in BAD
        state = scaling.update(state, finite, 2)
        if finite:
            total += np.mean([gradient(number, rank) for rank in ranks])
            applied += 1
    return total, applied, state


@case(params=MODES, sizes=(2,), hows=("mpi",))
@case(params={name: MODES[name] for name in ("horovod", "relaxed", "elements")}, sizes=(1, 3), gloo=(3,))
def all_ranks_skip_the_same_steps(world, chosen):
    mode, options = chosen
    relaxed = "variable_consistency" in options
    mgr, optimizer, trained = hv.create(mode, **AUTO, **options), tf.keras.optimizers.SGD(0.125), variables()
    run = make_step(world, mgr, optimizer, trained, mode == "independent")
    for number in range(STEPS):
        run(number)
    mgr.flush()
    total, applied, state = expected(world, mode, relaxed)
    rounding = 1e-3 if "copy_dtype" in options else 1e-5
    close(trained[0], np.full([5, 2], 1 - 0.125 * total), "dense", rounding)
    close(trained[1], np.array([[1 - 0.125 * total] * 2] * 2 + [[1.0] * 2]), "rows", rounding)
    assert int(optimizer.iterations) == applied
    assert mgr.saved_loss_scale() == [state.scale, state.good_steps] and mgr.report()["loss_scale"] == state.scale
    same_everywhere(world, mgr.saved_loss_scale())


@case(params=MODES, sizes=(2,), hows=("mpi",))
def a_constant_scale_is_divided_out(world, chosen):
    mode, options = chosen
    mgr, variable = hv.create(mode, use_fp16=True, **options), tf.Variable(tf.zeros([3], tf.float16))
    assert mgr.loss_scale == 128.0 and hv.create(mode).loss_scale == 1.0
    gradient = tf.constant([2e-6, 1.0, 3.0], tf.float32) * mgr.loss_scale
    mgr.apply_gradients(tf.keras.optimizers.SGD(1.0), [tf.cast(gradient, tf.float16)], [variable])
    mgr.flush()
    close(variable, np.array([-2e-6, -1.0, -3.0]), tolerance=1e-3)
    close(mgr.reduce([tf.cast(gradient, tf.float16)], [variable])[0], np.array([2e-6, 1.0, 3.0]), tolerance=1e-3)


@case(sizes=(1, 2), hows=("mpi",))
def a_checkpoint_keeps_the_scale(world):
    mgr, optimizer, trained = hv.create("horovod", **AUTO), tf.keras.optimizers.SGD(0.125), variables()
    run = make_step(world, mgr, optimizer, trained, False)
    for number in range(2):
        run(number)
    made = tempfile.mkdtemp() if world.rank == 0 else None
    place = os.path.join(world.meeting.gather_objects(made, "tests.scale")[0], "run")
    hv.checkpoint.save(place, mgr, variables=trained, optimizer=optimizer)
    again = hv.create("parameter_server", **AUTO)
    hv.checkpoint.restore(place, again, variables=variables(), optimizer=tf.keras.optimizers.SGD(0.125))
    assert again.saved_loss_scale() == mgr.saved_loss_scale() == [4.0, 0]


@case(sizes=(2,), hows=("mpi",))
def two_scales_are_refused(world):
    mgr, variable = hv.create("horovod", use_fp16=True), tf.Variable([1.0])
    scaled = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))
    message = raised(ValueError, lambda: mgr.apply_gradients(scaled, [tf.ones([1])], [variable]))
    assert "both unscale" in message
    same_everywhere(world, message)
    close(variable, array(tf.constant([1.0])))
