"""The timed steps: what a user would write with each library, with the same update code behind every reduction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.contenders import Contender
from benchmarks.data import Data, make_data
from benchmarks.profiles import Profile
from benchmarks.worlds import World

LEARNING_RATE = 1e-3
Step = Callable[[], "float | None"]


@dataclass(frozen=True)
class Prepared:
    """A step ready to be timed; `check` runs it once and raises if it computed something else than it should."""

    step: Step
    check: Callable[[Step], None]
    align: Callable[[], None]
    report: Callable[[], Any] = lambda: None


def build(world: World, spec: Contender, profile: Profile, shared: dict[Any, Any]) -> Prepared:
    """Collective: every rank of the job calls it in the same order. `shared` keeps one Data per profile and kind."""
    if spec.kind == "mpi4py":
        return _mpi4py(world, profile)
    if spec.kind in _BROADCASTS:
        return _broadcast(world, spec, profile)
    key = (profile.name, spec.optimizer)
    if key not in shared:
        shared[key] = make_data(world, spec, profile)
    data = shared[key]
    step, report = _BUILDERS[spec.kind](world, spec, data)
    alone = spec.kind in ("none", "by_hand") or spec.mode == "independent"
    gradient = world.rank + 1.0 if alone else (world.size + 1) / 2

    def check(step: Step) -> None:
        chosen = (data.variables[0], data.variables[-1])
        before = [_first(variable) for variable in chosen]
        step()
        moved = [_first(variable) - value for variable, value in zip(chosen, before, strict=True)]
        # Adam moves by about the learning rate, whatever the gradient's size.
        expected = -LEARNING_RATE * (1.0 if spec.optimizer == "adam" else gradient)
        if not all(math.isclose(value, expected, rel_tol=2e-2) for value in moved):
            raise RuntimeError(f"{spec.name}: expected a step of {expected} at both ends, got {moved}")

    return Prepared(step, check, world.align, report)


def sgd(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """The update behind every contender."""
    for gradient, variable in zip(gradients, variables, strict=True):
        variable.assign_sub(LEARNING_RATE * gradient)


def _first(variable: Any) -> float:
    value = getattr(variable, "value", variable)
    value = value() if callable(value) else value
    return float(value[(0,) * len(variable.shape)])


def _update(data: Data, reduce: Callable[[list[Any]], Sequence[Any]]) -> tuple[Step, Callable[[], Any]]:
    import tensorflow as tf

    @tf.function
    def step() -> None:
        sgd(reduce(data.read()), data.variables)

    return step, lambda: None


def _none(world: World, spec: Contender, data: Data) -> tuple[Step, Callable[[], Any]]:
    return _update(data, lambda gradients: gradients)


def _per_tensor(world: World, spec: Contender, data: Data) -> tuple[Step, Callable[[], Any]]:
    import horovod.tensorflow as hvd

    return _update(
        data, lambda grads: [hvd.allreduce(grad, op=hvd.Average, name=f"g{i}") for i, grad in enumerate(grads)]
    )


def _grouped(world: World, spec: Contender, data: Data) -> tuple[Step, Callable[[], Any]]:
    import horovod.tensorflow as hvd

    return _update(data, lambda gradients: hvd.grouped_allreduce(gradients, op=hvd.Average, name="group"))


def _packed(world: World, spec: Contender, data: Data) -> tuple[Step, Callable[[], Any]]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    def reduce(gradients: list[Any]) -> list[Any]:
        whole = tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], 0)
        pieces = tf.split(hvd.allreduce(whole, op=hvd.Average, name="packed"), [math.prod(s) for s in data.shapes])
        return [tf.reshape(piece, shape) for piece, shape in zip(pieces, data.shapes, strict=True)]

    return _update(data, reduce)


def _multiworker(world: World, spec: Contender, data: Data) -> tuple[Step, Callable[[], Any]]:
    import tensorflow as tf

    strategy, options = world.link

    def replica() -> None:
        context = tf.distribute.get_replica_context()
        sgd(context.all_reduce(tf.distribute.ReduceOp.MEAN, data.read(), options=options), data.variables)

    @tf.function
    def step() -> None:
        strategy.run(replica)

    return step, lambda: None


def _hvdvars(world: World, spec: Contender, data: Data) -> tuple[Step, Callable[[], Any]]:
    import tensorflow as tf

    import hvdvars as hv

    manager = hv.create(spec.mode, **spec.options)
    manager.broadcast(data.variables)
    if spec.optimizer == "adam":
        import keras

        optimizer = keras.optimizers.Adam(LEARNING_RATE)
    else:
        optimizer = sgd

    @tf.function
    def step() -> None:
        manager.apply_gradients(optimizer, data.read(), data.variables)

    return step, manager.report


def _by_hand(world: World, spec: Contender, data: Data) -> tuple[Step, Callable[[], Any]]:
    """The collectives that hvdvars issues for this data, on ready-made buffers, and the update behind them."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    managed, report = _hvdvars(world, spec, data)
    managed()
    plan = report()["plans"][0]
    count = int(plan["collectives_per_step"])
    elements = sum(math.prod(shape) for shape in data.shapes) // count
    buffers = [tf.Variable(tf.ones([elements]), trainable=False) for _ in range(count)]

    @tf.function
    def step() -> None:
        reduced = [
            hvd.allreduce(buffer.read_value(), op=hvd.Average, name=f"by_hand{i}") for i, buffer in enumerate(buffers)
        ]
        with tf.control_dependencies(reduced):
            sgd(data.read(), data.variables)

    return step, lambda: plan


def _mpi4py(world: World, profile: Profile) -> Prepared:
    import numpy as np

    world_mpi = world.link
    mine = np.full(profile.elements, world.rank + 1.0, dtype=np.float32)
    total = np.empty_like(mine)

    def step() -> None:
        world_mpi.COMM_WORLD.Allreduce(mine, total, op=world_mpi.SUM)

    def check(step: Step) -> None:
        step()
        expected = world.size * (world.size + 1) / 2
        if not (total == expected).all():
            raise RuntimeError(f"mpi4py: expected {expected} everywhere, got {total.min()} to {total.max()}")

    return Prepared(step, check, world.align)


def _broadcast(world: World, spec: Contender, profile: Profile) -> Prepared:
    """Each step calls with fresh variables and, for hvdvars, a fresh manager; only the call is timed."""
    import time

    import tensorflow as tf

    call = _BROADCASTS[spec.kind]

    def step() -> float:
        variables = [tf.Variable(tf.fill(shape, world.rank + 1.0)) for shape in profile.shapes]
        world.align()
        start = time.perf_counter()
        call(variables)
        seconds = time.perf_counter() - start
        if not _first(variables[0]) == _first(variables[-1]) == 1.0:
            raise RuntimeError(f"{spec.name}: variables differ from rank 0's")
        return seconds

    return Prepared(step, lambda step: None, world.align)


def _plain_broadcast(variables: list[Any]) -> None:
    import horovod.tensorflow as hvd

    hvd.broadcast_variables(variables, root_rank=0)


def _hvdvars_broadcast(variables: list[Any]) -> None:
    import hvdvars as hv

    hv.create("horovod").broadcast(variables)


_BROADCASTS = {"plain_broadcast": _plain_broadcast, "hvdvars_broadcast": _hvdvars_broadcast}
_BUILDERS: dict[str, Callable[[World, Contender, Data], tuple[Step, Callable[[], Any]]]] = {
    "none": _none,
    "per_tensor": _per_tensor,
    "grouped": _grouped,
    "packed": _packed,
    "multiworker": _multiworker,
    "hvdvars": _hvdvars,
    "by_hand": _by_hand,
}
