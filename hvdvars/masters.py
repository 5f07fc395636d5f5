"""Master copies of variables, on their owners, beside the copies that everybody reads.

An owner applies gradients to its masters; their values are gathered and assigned to the copies, which are the caller's
variables on every rank. A master may be more exact than what is published of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdvars import check, holding, owner, slots, sparse
from hvdvars.holding import Holding, Piece
from hvdvars.optimizer import tf_variable
from hvdvars.owner import Ownership
from hvdvars.session import world
from hvdvars.types import Gradient, Variable

# No slot is called so: names of attributes have no slash.
SLOT = "ps_var/"
"""The name under which masters are among the pieces of a checkpoint."""


class Masters:
    """The masters of whole variables that this rank owns, and restored values of masters that are still to be made."""

    def __init__(self, copy_dtype: str) -> None:
        self.held: dict[int, tf.Variable] = {}
        """By the id of the `tf.Variable` that is the copy."""
        self._copy_dtype = copy_dtype
        self._placed: set[int] = set()
        self._waiting: dict[int, np.ndarray] = {}

    @property
    def exact(self) -> bool:
        """Whether masters hold more than their copies, so that a checkpoint has both. Local."""
        return bool(self._copy_dtype)

    def make(self, variables: Sequence[Variable], owned: Sequence[Variable]) -> None:
        """Make a master for each of `owned`, this rank's part of `variables`, that has none yet. Local.

        It starts with a restored value that waits for it, or else with the value of its copy.
        """
        for variable in owned:
            key, dtype = id(tf_variable(variable)), check.dtype_of(variable).name
            if key in self.held:
                continue
            dtype = "float32" if dtype == self._copy_dtype else dtype
            waiting = self._waiting.get(key)
            first = tf.cast(tf_variable(variable).read_value() if waiting is None else tf.constant(waiting), dtype)
            self.held[key] = tf.Variable(
                first if waiting is None else self._newest(variable, first),
                name=f"ps_var/{check.name_of(variable)}",
                constraint=getattr(variable, "constraint", None),
            )
        self._settle(variables)

    def _settle(self, variables: Sequence[Variable]) -> None:
        keys = [id(tf_variable(variable)) for variable in variables]
        self._placed.update(keys)
        for key in keys:
            self._waiting.pop(key, None)

    def of(self, owned: Sequence[Variable]) -> list[tf.Variable]:
        """The masters of these variables, which this rank owns. Local."""
        return [self.held[id(tf_variable(variable))] for variable in owned]

    def take_in(self, owned: Sequence[Variable]) -> None:
        """Let what was assigned to the copies of this rank's masters since they were published count. Local."""
        for variable, master in zip(owned, self.of(owned), strict=True):
            master.assign(self._newest(variable, master))

    def adopt(self, variables: Sequence[Variable]) -> None:
        """Give the masters of these variables the values of their copies, all of it. Local, outside of graphs."""
        for variable in variables:
            self._waiting.pop(id(tf_variable(variable)), None)
            master = self.held.get(id(tf_variable(variable)))
            if master is not None:
                master.assign(tf.cast(tf_variable(variable).read_value(), master.dtype))

    def restore(self, variable: Variable, value: np.ndarray) -> None:
        """Give one master its value in a checkpoint, now or when it is made, and its copy what is published of it.

        Local, outside of graphs; on every rank.
        """
        key = id(tf_variable(variable))
        variable.assign(self._shown(tf.constant(value), check.dtype_of(variable)))
        if key in self.held:
            slots.write(self.held[key], value)
        elif key not in self._placed:
            self._waiting[key] = value

    def pieces(self, variables: Sequence[Variable]) -> list[Piece]:
        """What this rank has to add to a checkpoint of `variables`: masters that hold more than their copies.

        Local, outside of graphs.
        """
        found = []
        for index, variable in enumerate(variables):
            key = id(tf_variable(variable))
            master: Any = self.held.get(key)
            if master is None and world().rank == 0 and key in self._waiting:
                master = tf.constant(self._waiting[key])  # every rank has it
            if master is not None and self._published(master.dtype.name) != master.dtype.name:
                value = np.asarray(self._newest(variable, master).numpy())
                found.append(Piece(SLOT, index, 0, value.shape, value.reshape(-1)))
        return found

    def _newest(self, variable: Variable, master: Any) -> tf.Tensor:
        """The copy where it differs from what was published of the master, else the master, in the master's dtype."""
        copy = tf_variable(variable).read_value()
        if self._published(master.dtype.name) == master.dtype.name:
            return copy
        value = tf.convert_to_tensor(master)
        return tf.where(tf.equal(copy, self._shown(value, copy.dtype)), value, tf.cast(copy, value.dtype))

    def _shown(self, value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """What copies of `dtype` get of a master's value."""
        return tf.cast(tf.cast(value, self._published(value.dtype.name)), dtype)

    def _published(self, dtype: str) -> str:
        return owner.published_as(dtype, self._copy_dtype)


def gather(ownership: Ownership, own: Sequence[tf.Variable]) -> dict[int, tf.Tensor]:
    """All masters as they are now, by the index of their variables, in the dtypes in which they are published.

    `own` are this rank's: its shards, or masters that are aligned with `owner.owned_variables`.
    Collective: every rank of the group calls it in the same order, in a graph.
    """
    if ownership.placement == "elements":
        return dict(owner.gather_values(ownership, (), own))
    rest = iter(own)
    masters = [next(rest) if one == world().rank else None for one in ownership.owners]
    return dict(owner.gather_values(ownership, masters))


def spread(variables: Sequence[Variable], values: Mapping[int, tf.Tensor]) -> None:
    """Assign what `gather` gave to the copies, in their own dtypes. Local."""
    for index, value in values.items():
        variables[index].assign(tf.cast(value, check.dtype_of(variables[index])))


def updated_ones(ownership: Ownership, variables: Sequence[Variable]) -> list[Variable]:
    """The variables that this rank owns and has a gradient for. Local."""
    rank = world().rank
    return [variables[index] for index in ownership.updated if ownership.owners[index] == rank]


def as_masters(gradients: Sequence[Gradient], own: Sequence[tf.Variable]) -> list[Gradient]:
    """The gradients in the dtypes of the masters that they are for. Local."""
    return [sparse.cast(gradient, master.dtype) for gradient, master in zip(gradients, own, strict=True)]


def adopt_in_shards(uses: Sequence[Any], variables: Sequence[Variable]) -> None:
    """Take the values of these variables into the shards, of all these uses, that are their masters. Local."""
    places = {id(tf_variable(variable)): index for index, variable in enumerate(variables)}
    shards = [shard for use in uses for shard in shards_of(use)]
    parts = holding.cut_parts([use for use in uses if use.shards], places)
    held = Holding("masters", variables, slots.State(built=True, slots={SLOT: list(shards)}), parts, False)
    for index in sorted({part.variable for part in parts}):
        held.write(SLOT, index, slots.read(variables[index]))
    held.finish()


def shards_of(use: Any) -> list[tf.Variable]:
    """The shards that are the masters of one use, whichever optimizer applies gradients to them. Local."""
    return next(iter(use.shards.values()), [])
