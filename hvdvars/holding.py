"""The part of an optimizer's state that one rank holds, in terms of a list of variables: in and out of the slots.

Whatever the mode, a slot is named by its name and its variable's index, and has the variable's full shape; here are the
pieces of it that are on this rank. Slots of a master are those of its variable. No communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdvars import check, optimizer, owner, slots
from hvdvars.session import world
from hvdvars.types import Variable

_MOST_SHOWN = 8
# Set by a schedule at each step, or by the caller as they like: their lack is no sign of another optimizer.
_OPTIONAL = ("learning_rate", "current_learning_rate")


@dataclass(frozen=True)
class Part:
    """Elements of variable `variable`, flat from `start`: what the optimizer knows as `held`, from `offset`.

    `length` counts elements; None means all, in the slot's own shape.
    """

    variable: int
    held: int
    start: int = 0
    offset: int = 0
    length: int | None = None


@dataclass(frozen=True)
class Piece:
    """Values of one slot of variable `variable`, flat from element `start`; `shape` is that of the whole slot."""

    slot: str
    variable: int
    start: int
    shape: tuple[int, ...]
    values: np.ndarray


@dataclass
class Holding:
    """What an optimizer keeps on this rank; `everywhere` if all ranks keep the same."""

    name: str
    variables: Sequence[Variable]
    state: slots.State
    parts: list[Part]
    everywhere: bool
    _filled: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    _parts_of: dict[int, list[Part]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Look parts up by their variable."""
        for part in self.parts:
            self._parts_of.setdefault(part.variable, []).append(part)

    def pieces(self) -> Iterator[Piece]:
        """The slots' values on this rank. Local."""
        for slot, held in self.state.slots.items():
            values: dict[int, np.ndarray] = {}
            for part in self.parts:
                variable = held[part.held]
                if variable is None:
                    continue
                if part.held not in values:
                    values = {part.held: slots.read(variable)}
                value = values[part.held]
                if part.length is None:
                    yield Piece(slot, part.variable, 0, value.shape, value.reshape(-1))
                else:
                    shape = tuple(check.shape_of(self.variables[part.variable]))
                    flat = value.reshape(-1)[part.offset : part.offset + part.length]
                    yield Piece(slot, part.variable, part.start, shape, flat)

    def check(self, saved: dict[str, Any]) -> None:
        """Refuse state that does not fit what this rank holds. Local.

        `saved` has `class`, `slots` and `scalars` (names), and `shapes`: slot name → variable's index → shape.

        Raises:
            ValueError: slots, single values or shapes differ.
        """
        if not self.state.built:
            return
        mine = {name for name, held in self.state.slots.items() if any(slot is not None for slot in held)}
        if mine != set(saved["slots"]):
            raise ValueError(
                f"the optimizer {self.name} keeps the slots {sorted(mine)}, the checkpoint has "
                f"{sorted(saved['slots'])}. Create the optimizer with the arguments that it was saved with."
            )
        differ = set(self.state.scalars) ^ set(saved["scalars"])
        if any(name.rpartition(".")[2] not in _OPTIONAL for name in differ):
            raise ValueError(
                f"the optimizer {self.name} keeps {sorted(self.state.scalars)}, the checkpoint has "
                f"{sorted(saved['scalars'])}. Create the optimizer with the arguments that it was saved with."
            )
        for part in self.parts:
            for name, held in self.state.slots.items():
                self._check_shape(name, held[part.held], part, saved["shapes"])

    def _check_shape(self, name: str, slot: Variable | None, part: Part, shapes: dict[str, dict[str, Any]]) -> None:
        index = str(part.variable)
        if slot is None or not any(index in known for known in shapes.values()):
            return
        whole = self.variables[part.variable]
        expected = list(check.shape_of(slot if part.length is None else whole))
        if shapes[name].get(index) != expected:
            raise ValueError(
                f"slot {name!r} of variable {check.name_of(whole)} has shape {shapes[name].get(index)} in the "
                f"checkpoint and {expected} in the optimizer {self.name}"
            )

    def write(self, slot: str, variable: int, value: np.ndarray) -> None:
        """Take in the whole of one slot; what is not on this rank is left out. Local. `finish` follows the last one."""
        held = self.state.slots.get(slot, [])
        for part in self._parts_of.get(variable, []) if held else []:
            target = held[part.held]
            if target is None:
                continue
            if part.length is None:
                slots.write(target, value)
                continue
            if (slot, part.held) not in self._filled:
                self._filled[slot, part.held] = slots.read(target).copy()
            flat = self._filled[slot, part.held]
            flat[part.offset : part.offset + part.length] = value.reshape(-1)[part.start : part.start + part.length]

    def write_scalar(self, name: str, value: np.ndarray) -> bool:
        """Take in a single value, unless there is no place for it yet. Local."""
        if name not in self.state.scalars:
            return False
        slots.write(self.state.scalars[name], value)
        return True

    def finish(self) -> None:
        """Assign what `write` has put together of pieces. Local."""
        for (slot, held), flat in self._filled.items():
            slots.write(self.state.slots[slot][held], flat)
        self._filled.clear()


def hold(optimizer_: Any, variables: Sequence[Variable], uses: Sequence[Any]) -> Holding:
    """What this rank holds for `variables`, where a manager has used the optimizer in `uses` (none: not yet). Local.

    Variables of the uses that are not in `variables` are left out.
    """
    places = {id(optimizer.tf_variable(variable)): index for index, variable in enumerate(variables)}
    name = name_of(optimizer_)
    owned = [use for use in uses if isinstance(use.plan, owner.Ownership)]
    shards = [shard for use in owned for shard in use.shards.get(optimizer.identity_of(optimizer_), [])]
    if shards:
        return Holding(name, variables, slots.find(optimizer_, shards), cut_parts(owned, places), False)
    masters = {key: master for use in owned for key, master in use.masters.items()}
    state = slots.find(optimizer_, [masters.get(id(optimizer.tf_variable(one)), one) for one in variables])
    if not owned:
        return Holding(name, variables, state, [Part(i, i) for i in range(len(variables))], True)
    mine = [v for use in owned if use.plan.owners for v in owner.owned_variables(use.plan, use.variables)]
    indices = {places[key] for key in (id(optimizer.tf_variable(v)) for v in mine) if key in places}
    return Holding(name, variables, state, [Part(i, i) for i in sorted(indices)], False)


def held_variables(optimizer_: Any, use: Any) -> list[Variable]:
    """What the optimizer updates on this rank, in one use: shards, owned variables or their masters, or all. Local."""
    if not isinstance(use.plan, owner.Ownership):
        return list(use.variables)
    owned = owner.owned_variables(use.plan, use.variables)
    masters = [use.masters.get(id(optimizer.tf_variable(variable)), variable) for variable in owned]
    return use.shards.get(optimizer.identity_of(optimizer_)) or masters


def name_of(optimizer_: Any) -> str:
    """The name that tells one kind of optimizer from another; one for all plain callables. Local."""
    return "callable" if optimizer.kind_of(optimizer_) == "callable" else type(optimizer_).__name__


def cut_parts(uses: Sequence[Any], places: dict[int, int]) -> list[Part]:
    """The pieces of variables that lie in this rank's shards, the shards of all uses counted through. Local.

    `places` gives the index of a variable by the id of its `tf.Variable`; others are left out.
    """
    parts: list[Part] = []
    held = 0
    for use in uses:
        for bucket in use.plan.values.buckets:
            counts = owner.parts_of(bucket)
            begin = sum(counts[: world().rank])
            end = begin + counts[world().rank]
            for place in bucket.places:
                low, high = max(begin, place.offset), min(end, place.offset + place.size)
                variable = use.variables[use.plan.updated[place.index]]
                index = places.get(id(optimizer.tf_variable(variable)))
                if low < high and index is not None:
                    parts.append(Part(index, held, low - place.offset, low - begin, high - low))
            held += 1
    return parts


def check_trained(optimizer_: Any, uses: Sequence[Any], chosen: Sequence[Variable]) -> None:
    """Refuse, with ValueError, to leave out a variable that the optimizer has been used for. Local."""
    given = {id(optimizer.tf_variable(variable)) for variable in chosen}
    missing = [v for use in uses for v in use.variables if id(optimizer.tf_variable(v)) not in given]
    if missing:
        raise ValueError(
            f"the optimizer {name_of(optimizer_)} trains {check.name_of(missing[0])} (and "
            f"{len(missing) - 1} more), which is neither in model nor in variables. Add it to variables=."
        )


def assemble(
    headers: Sequence[Any], received: Sequence[Sequence[np.ndarray]]
) -> tuple[dict[tuple[str, int], np.ndarray], dict[str, np.ndarray]]:
    """Whole slots by name and variable, and single values by name, of all ranks' contributions. Local.

    A header has, for each piece, its slot's name, variable, start and shape, and the names of single values; what was
    received from that rank are the values, in this order. Single values are those of the first rank that has them.

    Raises:
        RuntimeError: pieces are missing.
    """
    whole: dict[tuple[str, int], np.ndarray] = {}
    missing: dict[tuple[str, int], int] = {}
    shared: dict[str, np.ndarray] = {}
    for (keys, names), arrays in zip(headers, received, strict=True):
        for (slot, variable, start, shape), values in zip(keys, arrays, strict=False):
            key = (slot, variable)
            if key not in whole:
                whole[key] = np.empty(shape, values.dtype)
                missing[key] = whole[key].size
            whole[key].reshape(-1)[start : start + values.size] = values
            missing[key] -= values.size
        for name, value in zip(names, arrays[len(keys) :], strict=True):
            shared.setdefault(name, value)
    wrong = [key for key, count in missing.items() if count]
    if wrong:
        raise RuntimeError(f"the ranks' pieces do not make up the slots {wrong[:_MOST_SHOWN]}; nothing was written")
    return dict(sorted(whole.items())), dict(sorted(shared.items()))
