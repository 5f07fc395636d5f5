"""Restored optimizer state on its way into slots, which may not exist yet. No communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdvars import holding, optimizer, slots
from hvdvars.holding import Holding, Piece
from hvdvars.types import Variable


class Waiting:
    """Restored state on its way: straight into slots, or kept on the manager until the optimizer has slots for it."""

    def __init__(self, optimizer_: Any, variables: Sequence[Variable], saved: Any, held: Holding, wait: bool) -> None:
        self.scalars: dict[str, np.ndarray] = {}
        self._optimizer, self._variables, self._saved = optimizer_, variables, saved
        self._held, self._wait = held, wait
        self._slots: dict[tuple[str, int], np.ndarray] = {}

    def take(self, kind: str, rest: str, value: np.ndarray) -> None:
        """Take in `scalar` or `slot`; `rest` is its name, and its variable's index behind a slash. Local."""
        if kind == "scalar":
            if not self._held.write_scalar(rest, value) and self._wait:
                self.scalars[rest] = value
            return
        slot, _, index = rest.rpartition("/")
        if self._wait:
            self._slots[slot, int(index)] = value
        else:
            self._held.write(slot, int(index), value)

    def arrived(self) -> None:
        """Everything has been taken in. Local."""
        self._held.finish()

    def pieces(self, variables: Sequence[Variable]) -> list[Piece]:
        """What still waits, in terms of these variables. Local."""
        places = {id(optimizer.tf_variable(variable)): index for index, variable in enumerate(variables)}
        pieces = []
        for (slot, index), value in self._slots.items():
            place = places.get(id(optimizer.tf_variable(self._variables[index])))
            if place is not None:
                pieces.append(Piece(slot, place, 0, value.shape, value.reshape(-1)))
        return pieces

    def settle(self, use: Any) -> None:
        """Assign what waits for the variables of this use, of which the optimizer has just got its slots. Local.

        Raises:
            ValueError: its slots are not those of the file.
        """
        if not self._slots and not self.scalars:
            return
        slots.create(self._optimizer, holding.held_variables(self._optimizer, use))
        held = holding.hold(self._optimizer, self._variables, [use])
        held.check(self._saved)
        keys = {id(optimizer.tf_variable(variable)) for variable in use.variables}
        for slot, index in list(self._slots):
            if id(optimizer.tf_variable(self._variables[index])) in keys:
                held.write(slot, index, self._slots.pop((slot, index)))
        held.finish()
        for name, value in self.scalars.items():
            held.write_scalar(name, value)
        self.scalars.clear()


def target(optimizer_: Any, uses: Sequence[Any], chosen: Sequence[Variable], saved: Any, owners: bool) -> Waiting:
    """Where the optimizer's state goes: into its slots, or aside until it has them. Local.

    `uses` are the manager's of this optimizer; `owners` tells that a manager like this one gives variables to owners.
    `saved` is what `with_shapes` gives.

    Raises:
        ValueError: the optimizer's state is not what was saved.
    """
    holding.check_trained(optimizer_, uses, chosen)
    held = holding.hold(optimizer_, chosen, uses)
    fresh = not uses and not held.state.built
    # With owners, the plan of the first step decides which slots exist here. Without, they are made now, so that they
    # have their values also where the caller applies reduced gradients without the manager.
    wait = fresh and owners
    if fresh and not wait and saved["slots"]:
        slots.create(optimizer_, [variable for variable in chosen if getattr(variable, "trainable", True)])
        held = holding.hold(optimizer_, chosen, uses)
    held.check(saved)
    return Waiting(optimizer_, chosen, saved, held, wait)


def with_shapes(saved: Any, layout: Sequence[Sequence[Any]]) -> Any:
    """What the file says about the optimizer, with `shapes`: slot name → variable's index → shape. Local."""
    shapes: dict[str, dict[str, Any]] = {}
    for key, _, shape in layout:
        kind, _, rest = key.partition("/")
        if kind == "slot":
            name, _, index = rest.rpartition("/")
            shapes.setdefault(name, {})[index] = shape
    return None if saved is None else {**saved, "shapes": shapes}


def check_optimizer(path: Any, saved: Any, name: str) -> None:
    """Refuse, with ValueError, the state of another kind of optimizer. Local."""
    if saved is None:
        raise ValueError(f"{path} was saved without an optimizer. Leave out optimizer= to restore the variables alone.")
    if saved["class"] != name:
        raise ValueError(
            f"{path} holds the state of the optimizer {saved['class']}, not of {name}. Use that one, or leave out "
            "optimizer= to restore the variables alone."
        )
