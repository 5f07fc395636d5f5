"""One face for every optimizer: Keras 3, Keras 2 (`tf.keras`, `tf_keras`), `tf.compat.v1.train`, or a plain callable.

Recognised by what they offer, so that no Keras has to be imported. No communication here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdvars.types import Gradient, Variable

# Each of these updates an element from that element's own history alone, so that variables may be cut anywhere.
_ELEMENTWISE = {
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "Nadam",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Ftrl",
    "Lion",
    "GradientDescentOptimizer",
    "MomentumOptimizer",
    "AdamOptimizer",
    "RMSPropOptimizer",
    "AdagradOptimizer",
}


def kind_of(optimizer: Any) -> str:
    """`keras3`, `keras2`, `keras2_legacy`, `v1` or `callable`. Local. Raises TypeError for anything else."""
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return "v1"
    if hasattr(optimizer, "apply") and hasattr(optimizer, "build"):
        return "keras3"
    if hasattr(optimizer, "apply_gradients"):
        return "keras2" if hasattr(optimizer, "build") else "keras2_legacy"
    if callable(optimizer):
        return "callable"
    raise TypeError(
        f"apply_gradients: optimizer must be a Keras or tf.compat.v1.train optimizer or a callable(grads, variables), "
        f"got {type(optimizer).__name__}"
    )


def identity_of(optimizer: Any) -> Any:
    """What tells optimizers apart: a bound method is a new object each time it is named. Local."""
    method = getattr(optimizer, "__func__", None)
    return id(optimizer) if method is None else (id(optimizer.__self__), id(method))


def tf_variable(variable: Variable) -> tf.Variable:
    """The `tf.Variable` inside a Keras 3 variable, or the variable itself. Local."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


def build(optimizer: Any, variables: Sequence[Variable]) -> None:
    """Create the slots for exactly these variables, unless the optimizer was built before.

    Local. Raises ValueError where it was built for other variables.
    """
    kind = kind_of(optimizer)
    if kind not in ("keras3", "keras2"):
        return
    if kind == "keras3" and optimizer.built:
        known = getattr(optimizer, "_trainable_variables", None)
        missing = [] if known is None else [v for v in variables if not any(v is other for other in known)]
        if missing:
            raise ValueError(
                f"apply_gradients: the optimizer has no slots for {getattr(missing[0], 'path', missing[0].name)}: it "
                f"was built for {len(known or [])} others. Pass all variables each time, with None for those that "
                "rest, and an optimizer that nothing has built before; or a new optimizer for the new list."
            )
        return
    if kind == "keras2" and getattr(optimizer, "_built", False):
        return
    with tf.init_scope():
        optimizer.build(list(variables))


def apply(optimizer: Any, gradients: Sequence[Gradient], variables: Sequence[Variable]) -> None:
    """Apply gradients to the variables they are aligned with; `None` gradients are left out. Local."""
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    if not pairs:
        advance(optimizer)
        return
    kind = kind_of(optimizer)
    if kind == "keras3":
        optimizer.apply([g for g, _ in pairs], [v for _, v in pairs])
    elif kind in ("keras2", "keras2_legacy", "v1"):
        options = {"skip_gradients_aggregation": True} if kind == "keras2" else {}
        optimizer.apply_gradients(pairs, **options)
    else:
        optimizer([g for g, _ in pairs], [v for _, v in pairs])


def advance(optimizer: Any) -> None:
    """Count one step without touching a variable: a rank that owns nothing keeps up with schedules. Local."""
    # With gradient accumulation, Keras 3 works `iterations` out of the variable that counts.
    counters = [getattr(optimizer, name, None) for name in ("_iterations", "iterations")]
    counter = next((one for one in counters if hasattr(one, "assign_add")), None)
    if counter is not None:
        tf_variable(counter).assign_add(1)


def is_elementwise(optimizer: Any) -> bool | None:
    """Whether variables may be cut anywhere under this optimizer; None for a callable, which only its writer knows.

    Local. Per-variable clipping (`clipnorm`) and weight decay that leaves out named variables need whole variables.
    """
    if kind_of(optimizer) == "callable":
        return None
    if type(optimizer).__name__ not in _ELEMENTWISE or getattr(optimizer, "clipnorm", None) is not None:
        return False
    if type(optimizer).__name__ == "Nadam" and kind_of(optimizer) == "keras2":
        return False  # Keras 2 multiplies its momentum schedule once per variable
    excluded = any(
        getattr(optimizer, name, None)
        for name in ("_exclude_from_weight_decay_pattern", "_exclude_from_weight_decay", "_exclude_variables_ids")
    )
    return not excluded


def decay_alike(optimizer: Any, variables: Sequence[Variable], others: Sequence[Variable]) -> None:
    """Let weight decay leave out those of `others` whose variable it leaves out, by its name or itself. Local."""
    asks = getattr(optimizer, "_use_weight_decay", None)
    if asks is None:
        return
    for variable, other in zip(variables, others, strict=True):
        key, decays = optimizer._var_key(other), asks(variable)
        if hasattr(optimizer, "_exclude_from_weight_decay_cache"):
            optimizer._exclude_from_weight_decay_cache[key] = decays
        elif not decays:
            optimizer._exclude_from_weight_decay.append(key)


def describe(optimizer: Any) -> str:
    """Class and settings, without names: what has to be equal on all ranks. Local."""
    try:
        with tf.init_scope():  # the learning rate is read
            config = dict(optimizer.get_config())
    except (AttributeError, NotImplementedError):
        config = {}
    return f"{type(optimizer).__name__} {json.dumps(_without_names(config), sort_keys=True, default=str)}"


def _without_names(config: Any) -> Any:
    """Without names at any depth: Keras counts in them what a rank has made, and an optimizer may hold another."""
    if isinstance(config, dict):
        return {key: _without_names(value) for key, value in config.items() if key != "name"}
    return [_without_names(value) for value in config] if isinstance(config, (list, tuple)) else config


def scales_loss(optimizer: Any) -> bool:
    """Whether the optimizer unscales gradients itself, and skips steps by what it finds in them. Local."""
    return hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "dynamic_scale")


def global_clipnorm(optimizer: Any) -> float | None:
    """The norm of all gradients together to which the optimizer clips, if it does. Local."""
    return getattr(optimizer, "global_clipnorm", None)


def shared_state(optimizer: Any) -> list[Variable]:
    """What is equal on all ranks in every mode: the step counter and the learning rate. Local."""
    found = [getattr(optimizer, name, None) for name in ("iterations", "_iterations", "_learning_rate")]
    unique: dict[int, Variable] = {}
    for variable in found:
        if hasattr(variable, "assign") and hasattr(variable, "shape"):
            unique.setdefault(id(variable), variable)
    return list(unique.values())


def state(optimizer: Any) -> list[Variable]:
    """All variables of the optimizer, in its own order; none for a callable. Local."""
    variables = getattr(optimizer, "variables", None)
    found = variables() if callable(variables) else variables
    return list(found) if found is not None else []


def state_bytes(optimizer: Any) -> int:
    """Bytes of the optimizer's slots on this rank, without counters. Local."""
    shared = {id(variable) for variable in shared_state(optimizer)}
    slots = [variable for variable in state(optimizer) if id(variable) not in shared]
    return sum(tf.TensorShape(slot.shape).num_elements() * tf.as_dtype(slot.dtype).size for slot in slots)
