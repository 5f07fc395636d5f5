"""The state of any optimizer, by name: one slot per variable (`momentums`, `velocities`, …), and single variables.

Keras keeps slots in attributes that are lists aligned with the variables it was built for; `tf.compat.v1.train` and
the legacy Keras 2 optimizers answer `get_slot`. Found by that, whatever the optimizer. No communication here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from hvdvars import check, optimizer
from hvdvars.types import Variable

# Lists that hold everything, or what the optimizer updates: no slots.
_NO_SLOTS = ("_variables", "_trainable_variables")


@dataclass
class State:
    """What one optimizer keeps on this rank.

    `slots` has, by name, one entry per variable that was asked for: its slot, or None. `scalars` are the step counter,
    the learning rate and what else is no slot, by name. `built` tells whether slots have been created. `rest` are
    variables of the optimizer that are neither.
    """

    built: bool = False
    slots: dict[str, list[Variable | None]] = field(default_factory=dict)
    scalars: dict[str, Variable] = field(default_factory=dict)
    rest: list[Variable] = field(default_factory=list)


def find(optimizer_: Any, variables: Sequence[Variable]) -> State:
    """The state that an optimizer keeps for these variables; None for variables that it does not know.

    Names are those of the attributes, without leading underscores, and with `inner.` in front for an optimizer inside
    this one. A plain callable has no state. Local.

    Raises:
        TypeError: this is no optimizer.
    """
    keys = [id(optimizer.tf_variable(variable)) for variable in variables]
    state = State()
    kind = optimizer.kind_of(optimizer_)
    if kind in ("keras3", "keras2"):
        _find_attributes(optimizer_, list(variables), keys, "", state, set())
    elif kind in ("keras2_legacy", "v1"):
        _find_slots(optimizer_, variables, state)
    known = {id(v) for v in [*_present(state), *state.scalars.values()]}
    state.rest = [variable for variable in optimizer.state(optimizer_) if id(variable) not in known]
    return state


def create(optimizer_: Any, variables: Sequence[Variable]) -> None:
    """Create slots for these variables now, also in optimizers that would do so at their first step. Local.

    Raises:
        ValueError: the optimizer was built for other variables.
    """
    if not variables:
        return
    optimizer.build(optimizer_, variables)
    kind = optimizer.kind_of(optimizer_)
    plain = [optimizer.tf_variable(variable) for variable in variables]
    with tf.init_scope():
        if kind == "keras2_legacy":
            optimizer_._create_all_weights(plain)
        elif kind == "v1":
            optimizer_._create_slots(plain)


def read(variable: Variable) -> np.ndarray:
    """The variable's value. Local, outside of graphs."""
    return np.asarray(tf.convert_to_tensor(optimizer.tf_variable(variable)).numpy())


def write(variable: Variable, value: np.ndarray) -> None:
    """Assign the value, cast to the variable's dtype. Local, outside of graphs."""
    target = optimizer.tf_variable(variable)
    target.assign(tf.cast(tf.constant(value), check.dtype_of(target)))


def _present(state: State) -> list[Variable]:
    return [slot for slots in state.slots.values() for slot in slots if slot is not None]


def _find_attributes(
    optimizer_: Any, variables: list[Variable], keys: list[int], prefix: str, state: State, seen: set[int]
) -> None:
    """Add what the attributes of a Keras optimizer hold, and those of an optimizer inside it."""
    seen.add(id(optimizer_))
    count, places = _built_for(optimizer_, variables, keys)
    state.built = state.built or bool(getattr(optimizer_, "built", False) or getattr(optimizer_, "_built", False))
    for attribute, value in list(vars(optimizer_).items()):
        name = prefix + attribute.lstrip("_")
        if _is_variable(value):
            state.scalars[name] = value
        elif hasattr(value, "apply_gradients") and id(value) not in seen:
            _find_attributes(value, variables, keys, f"{prefix}inner.", state, seen)
        elif attribute not in _NO_SLOTS and count and _is_slot_list(value, count):
            state.slots[name] = [None if place is None else value[place] for place in places]


def _built_for(optimizer_: Any, variables: list[Variable], keys: list[int]) -> tuple[int, list[int | None]]:
    """How many variables a Keras optimizer was built for, and the place of each of ours among them."""
    trained = getattr(optimizer_, "_trainable_variables", None)
    if trained is not None:
        order = {id(optimizer.tf_variable(variable)): place for place, variable in enumerate(trained)}
        return len(trained), [order.get(key) for key in keys]
    index = getattr(optimizer_, "_index_dict", None) or {}
    return len(index), [index.get(optimizer_._var_key(optimizer.tf_variable(variable))) for variable in variables]


def _is_variable(value: Any) -> bool:
    return hasattr(value, "assign") and hasattr(value, "shape")


def _is_slot_list(value: Any, count: int) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) != count:
        return False
    return any(_is_variable(slot) for slot in value) and all(slot is None or _is_variable(slot) for slot in value)


def _find_slots(optimizer_: Any, variables: Sequence[Variable], state: State) -> None:
    """Add what an optimizer with `get_slot` holds."""
    plain = [optimizer.tf_variable(variable) for variable in variables]
    for name in optimizer_.get_slot_names():
        # Asked for under the name it was made with; v1 answers None where there is none, legacy Keras raises.
        state.slots[name] = [_get_slot(optimizer_, variable, name) for variable in plain]
    state.built = bool(_present(state))
    shared = {"iterations": getattr(optimizer_, "iterations", None)}
    shared["learning_rate"] = (getattr(optimizer_, "_hyper", None) or {}).get("learning_rate")
    shared |= {name: value for (name, _), value in (getattr(optimizer_, "_non_slot_dict", None) or {}).items()}
    shared |= {name.lstrip("_"): value for name, value in list(vars(optimizer_).items())}
    state.scalars.update({name: value for name, value in shared.items() if _is_variable(value)})


def _get_slot(optimizer_: Any, variable: Any, name: str) -> Variable | None:
    try:
        return optimizer_.get_slot(variable, name)
    except KeyError:
        return None
