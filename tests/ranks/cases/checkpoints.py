"""Whole checkpoints: from every mode into every mode, and the same error on every rank."""

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf

import hvdvars as hv
from hvdvars import check, relay

from . import case
from .tools import array, close, data, raised, same_everywhere

MODES = {
    "horovod": ("horovod", {}),
    "replicated": ("replicated", {}),
    "collective": ("collective_all_reduce", {}),
    "variables": ("parameter_server", {"placement": "variables"}),
    "elements": ("parameter_server", {"placement": "elements"}),
    "masters": ("distributed_replicated", {}),
    "staged": ("parameter_server", {"staged_vars": True}),
    "staged-elements": ("parameter_server", {"staged_vars": True, "placement": "elements"}),
}
FROM = {
    "horovod": ("horovod", "variables", "elements"),
    "variables": ("horovod", "variables", "staged"),
    "elements": tuple(MODES),
    "masters": ("horovod", "masters", "elements"),
    "staged-elements": ("horovod", "staged"),
}
# The last is too large to be packed, and cut by every number of ranks.
SHAPES = [(5, 3), (7,), (), (0, 2), (17_001,)]
SLOTS = ("momentums", "velocities", "velocity_hats")


def adam():
    return tf.keras.optimizers.Adam(0.05, amsgrad=True)


def make():
    return [tf.Variable(np.full(shape, 0.5, "float32"), name=f"w{i}") for i, shape in enumerate(SHAPES)]


def gradients(step, rank):
    generator = np.random.default_rng([step, rank])
    return [tf.constant(generator.standard_normal(shape).astype("float32")) for shape in SHAPES]


def alone(world, steps):
    """Optimizer and variables of one process that takes the mean over what all ranks' gradients are."""
    optimizer, variables = adam(), make()
    optimizer.build(variables)
    for step in range(steps):
        ranks = [gradients(step, rank) for rank in world.ranks]
        means = [tf.add_n(list(all_of_one)) / world.size for all_of_one in zip(*ranks, strict=True)]
        optimizer.apply_gradients(zip(means, variables, strict=True))
    return optimizer, variables


def train(world, mgr, optimizer, variables, first, last):
    for step in range(first, last):
        mgr.apply_gradients(optimizer, gradients(step, world.rank), variables)


def folder(world):
    """A new folder, the same on every rank."""
    made = tempfile.mkdtemp() if world.rank == 0 else None
    return Path(world.meeting.gather_objects(made, "tests.folder")[0])


def reference(world):
    """What one process has after two and after four steps, made once."""
    if "checkpoints" not in world.notes:
        optimizer, variables = alone(world, 2)
        after_two = {f"variable/{i}": array(v) for i, v in enumerate(variables)}
        for name in SLOTS:
            slots = getattr(optimizer, f"_{name}")
            after_two |= {f"slot/{name}/{i}": array(slot) for i, slot in enumerate(slots)}
        after_two["scalar/iterations"] = np.array(2)
        world.notes["checkpoints"] = after_two, [array(v) for v in alone(world, 4)[1]]
    return world.notes["checkpoints"]


@case(params=list(FROM), sizes=(2,), hows=("mpi",))
@case(params=("horovod", "variables", "elements"), sizes=(3, 4), hows=("mpi",))
def from_one_mode_into_others(world, start):
    after_two, after_four = reference(world)
    mode, options = MODES[start]
    optimizer, variables, mgr = adam(), make(), hv.create(mode, **options)
    train(world, mgr, optimizer, variables, 0, 2)
    path = hv.checkpoint.save(folder(world) / "c", mgr, variables=variables, optimizer=optimizer, extra={"epoch": 2})
    with np.load(path) as file:
        for key, value in after_two.items():
            if value.size:  # slots without elements have no owner
                close(np.asarray(file[key]), value, f"{start}: {key}", 1e-5)
    for end in FROM[start]:
        mode, options = MODES[end]
        optimizer, variables, mgr = adam(), make(), hv.create(mode, **options)
        extra = hv.checkpoint.restore(path, mgr, variables=variables, optimizer=optimizer)
        assert extra == {"epoch": 2} and int(optimizer.iterations) == 2
        train(world, mgr, optimizer, variables, 2, 4)
        mgr.flush()
        hv.verify(variables)
        for index, (variable, value) in enumerate(zip(variables, after_four, strict=True)):
            close(variable, value, f"{start} into {end}: variables[{index}]", 1e-5)


@case()
def in_small_chunks_and_before_the_first_step(world):
    mode, options = MODES["elements"]
    optimizer, variables, mgr = adam(), make()[:4], hv.create(mode, **options)
    mgr.apply_gradients(optimizer, gradients(0, world.rank)[:4], variables)
    place = folder(world)
    whole = hv.checkpoint.save(place / "whole", mgr, variables=variables, optimizer=optimizer)
    before, relay.CHUNK_BYTES = relay.CHUNK_BYTES, 40
    try:
        small = hv.checkpoint.save(place / "small", mgr, variables=variables, optimizer=optimizer)
        optimizer, variables, mgr = adam(), make()[:4], hv.create(mode, **options)
        hv.checkpoint.restore(small, mgr, variables=variables, optimizer=optimizer)
        again = hv.checkpoint.save(place / "again", mgr, variables=variables, optimizer=optimizer)
    finally:
        relay.CHUNK_BYTES = before
    with np.load(whole) as one, np.load(small) as two, np.load(again) as three:
        assert one.files == two.files == three.files
        for key in one.files[1:]:
            assert one[key].tobytes() == two[key].tobytes() == three[key].tobytes(), key


@case()
def restored_into_an_optimizer_in_use(world):
    for mode, options in (MODES["variables"], MODES["elements"], MODES["horovod"], MODES["masters"], MODES["staged"]):
        optimizer, variables, mgr = adam(), make(), hv.create(mode, **options)
        train(world, mgr, optimizer, variables, 0, 2)
        path = hv.checkpoint.save(folder(world) / "c", mgr, variables=variables, optimizer=optimizer)
        train(world, mgr, optimizer, variables, 2, 4)
        mgr.flush()
        once = [data(variable) for variable in variables]
        hv.checkpoint.restore(path, mgr, variables=variables, optimizer=optimizer)
        train(world, mgr, optimizer, variables, 2, 4)
        mgr.flush()
        assert [data(variable) for variable in variables] == once, mode


@case()
def rank_0_alone_reads_and_writes(world):
    """The others' paths and values do not count; its path is everybody's result."""
    place = folder(world)
    mine = place / "c" if world.rank == 0 else "/nowhere/else"
    variables, mgr = [tf.Variable([1.0 + world.rank], name="w")], hv.create("horovod")
    extra = {"rank": world.rank}
    path = hv.checkpoint.save(mine, mgr, variables=variables, extra=extra)
    assert path == place / "c.npz" and os.listdir(place) == ["c.npz"]
    variables[0].assign([9.0])
    assert hv.checkpoint.restore(mine, mgr, variables=variables) == {"rank": 0}
    close(variables[0], [1.0])


@case()
def every_rank_hears_of_a_file_that_cannot_be_written(world):
    place = folder(world)
    if world.rank == 0:
        (place / "file").write_text("")
    variables, mgr = make(), hv.create("horovod")
    message = raised(OSError, lambda: hv.checkpoint.save(place / "file" / "c", mgr, variables=variables))
    assert message.startswith("checkpoint.save: ") and "file" in message
    same_everywhere(world, message)
    hv.barrier()
    assert os.listdir(place) == ["file"]


@case()
def every_rank_hears_of_a_file_that_cannot_be_read(world):
    place = folder(world)
    variables, mgr = make(), hv.create("horovod")
    path = hv.checkpoint.save(place / "good", mgr, variables=variables)
    hv.barrier()
    if world.rank == 0:
        content = path.read_bytes()
        (place / "damaged.npz").write_bytes(content[:500] + b"\x00" * 9 + content[509:])
        (place / "short.npz").write_bytes(content[:-100])
        np.savez(place / "foreign.npz", a=1)
    for name, kind, part in [
        ("missing", FileNotFoundError, "there is no file"),
        ("damaged", ValueError, "is damaged"),
        ("short", ValueError, "is damaged"),
        ("foreign", ValueError, "has no 'meta'"),
    ]:
        message = raised(kind, lambda name=name: hv.checkpoint.restore(place / name, mgr, variables=variables))
        assert message.startswith("checkpoint.restore: ") and part in message and f"{name}.npz" in message, message
        same_everywhere(world, message)
    wrong = [tf.Variable(tf.zeros([2]), name="other"), *make()[1:]]
    message = raised(ValueError, lambda: hv.checkpoint.restore(path, mgr, variables=wrong))
    assert "variables[0] is w0 (5, 3) float32 in the file and other (2,) float32 here" in message, message
    same_everywhere(world, message)
    message = raised(ValueError, lambda: hv.checkpoint.restore(path, mgr, variables=variables, optimizer=adam()))
    assert "saved without an optimizer" in message
    same_everywhere(world, message)
    close(wrong[0], [0.0, 0.0])
    hv.checkpoint.restore(path, mgr, variables=variables)


@case(sizes=(2, 3, 4))
def ranks_that_differ_are_told(world):
    place, mgr, last = folder(world), hv.create("horovod"), world.size - 1
    odd = world.rank == last
    calls = [
        (TypeError, f"extra must be a dict of JSON-able values, got int (on rank {last})", make(), {"extra": 3}),
        (ValueError, f"rank 0 has 5 variables, rank {last} has 2", make()[:2], {}),
        (ValueError, "variables[0] (w0) has shape [5, 3] on rank 0 and [5] on", [tf.ones([5])], {}),
    ]
    for kind, part, variables, arguments in calls:
        variables = [tf.Variable(v, name="w0") if tf.is_tensor(v) else v for v in variables]
        mine = (variables, arguments) if odd else (make()[: 1 if len(variables) == 1 else 5], {})
        message = raised(kind, lambda mine=mine: hv.checkpoint.save(place / "c", mgr, variables=mine[0], **mine[1]))
        assert part in message, message
        same_everywhere(world, message)
    call = hv.checkpoint.restore if odd else hv.checkpoint.save
    message = raised(ValueError, lambda: call(place / "c", mgr, variables=make()))
    assert f"rank 0 is in checkpoint.save, rank {last} is in checkpoint.restore" in message
    same_everywhere(world, message.partition(": ")[2])
    hv.barrier()
    assert os.listdir(place) == []


@case(params={name: MODES[name] for name in ("variables", "masters")}, sizes=(1, 2))
def a_keras_model_as_plain_numpy(world, chosen):
    mode, options = chosen
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3), tf.keras.layers.BatchNormalization()])
    optimizer, mgr = adam(), hv.create(mode, **options)
    mgr.broadcast(model)
    grads = [tf.ones_like(array(v)) for v in model.trainable_variables]
    mgr.apply_gradients(optimizer, grads, model.trainable_variables)
    path = hv.checkpoint.save(folder(world) / "m", mgr, model=model, optimizer=optimizer)
    with np.load(path) as file:
        meta = json.loads(str(file["meta"]))
        if world.rank == 0:  # Keras's counters in names may differ between ranks
            assert [one["name"] for one in meta["variables"]] == [check.name_of(weight) for weight in model.weights]
        for index, weight in enumerate(model.weights):
            close(array(weight), file[f"variable/{index}"])
        kept = [i for i, w in enumerate(model.weights) if w.trainable]
        for index in kept:
            close(
                np.asarray(file[f"slot/momentums/{index}"]), np.full(model.weights[index].shape, 0.1), "momentum", 1e-6
            )
        assert sorted(k for k in file.files if k.startswith("slot/momentums/")) == [f"slot/momentums/{i}" for i in kept]
