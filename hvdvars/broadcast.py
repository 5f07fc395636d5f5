"""The same values everywhere: from one root rank, or from each variable's owner, in a handful of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdvars import check, collectives, fusion, optimizer, wire
from hvdvars.session import require_started, world
from hvdvars.types import Variable

# One buffer at a time, of a size that every rank has to spare.
_MOST_BYTES = 256 * 1024 * 1024


def broadcast_variables(variables: Sequence[Variable], root: int = 0, name: str = "broadcast") -> None:
    """Give each variable the value that it has on rank `root`, packed into one broadcast per dtype.

    Collective: every rank of the group calls it in the same order, outside of graphs, with variables of the same
    shapes and dtypes in the same order. Strings and other types that cannot be sent raise TypeError.

    Raises:
        RuntimeError: `hvdvars.init` has not been called; or a graph of TensorFlow 1, where values belong to a session.
        TypeError: a dtype cannot be sent.
    """
    require_started("broadcast")
    with tf.init_scope():
        if not tf.executing_eagerly():
            raise RuntimeError("broadcast works in eager mode; in a graph of TensorFlow 1 run get_post_init_ops")
        values = [tf.convert_to_tensor(optimizer.tf_variable(variable)) for variable in variables]
        dtypes = [value.dtype.name for value in values]
        for variable, value in zip(variables, values, strict=True):
            wire.transfer_type("broadcast", value.dtype, check.name_of(variable))
        plan = fusion.plan([value.shape for value in values], dtypes, small_bytes=None, max_bytes=_MOST_BYTES)
        if world().size == 1:
            return
        for bucket in plan.buckets:
            received = collectives.broadcast(fusion.fill(bucket, values), root, f"hvdvars.{name}.{bucket.dtype}")
            for place, value in zip(bucket.places, fusion.cut(received, bucket.places), strict=True):
                if world().rank != root:
                    variables[place.index].assign(value)


def flatten_targets(targets: Any, slots: bool = True) -> list[Variable]:
    """The variables in a variable, an optimizer, a model, or a list of these: what `mgr.broadcast` takes.

    An optimizer counts with its step counter, its learning rate and, if `slots`, the slots that it has so far. Local.

    Raises:
        TypeError: something else is in there.
    """
    if isinstance(targets, (list, tuple)):
        return [variable for target in targets for variable in flatten_targets(target, slots)]
    if hasattr(targets, "assign") and hasattr(targets, "shape"):
        return [targets]
    if hasattr(targets, "apply_gradients"):
        return _unique([*optimizer.shared_state(targets), *(optimizer.state(targets) if slots else [])])
    if hasattr(targets, "trainable_variables") and hasattr(targets, "weights"):
        return list(targets.weights)  # not the seeds, which belong to a rank
    raise TypeError(
        f"broadcast: expected variables, optimizers or models, or a list of them, got {type(targets).__name__}"
    )


def _unique(variables: Sequence[Variable]) -> list[Variable]:
    return list({id(variable): variable for variable in variables}.values())
