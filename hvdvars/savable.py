"""What a graph of TensorFlow 1 saves, under names that do not depend on the mode; and how ranks get rank 0's values.

Rank 0 has every variable that is saved. In a mode with owners, the others have those they need.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdvars import check, collectives, fusion, meeting, wire
from hvdvars.getters import SHADOW_PREFIX
from hvdvars.session import world

v1 = tf.compat.v1

_MOST_BYTES = 256 * 1024 * 1024
_MOST_SHOWN = 8
_PREFIX = re.compile(rf"({SHADOW_PREFIX}/)?v(\d*)/(.+)")


@dataclass(frozen=True)
class Place:
    """Where a variable belongs, by its name: `tower` is a number, "" for one that towers share, None for neither."""

    name: str
    tower: str | None
    master: bool


@dataclass(frozen=True)
class Saved:
    """One value that is saved under `name`, as `dtype`: `targets` are all variables here that have the same value.

    Rank 0 saves it from `source`; elsewhere this may be a copy of another dtype.
    """

    name: str
    source: Any
    targets: tuple[Any, ...]
    dtype: tf.DType


def locate(variable: Any) -> Place:
    """The variable's name without the scopes of a tower and of master copies, and what these were. Local."""
    name = check.name_of(variable)
    match = _PREFIX.fullmatch(name)
    return Place(name, None, False) if match is None else Place(match[3], match[2], bool(match[1]))


def name_saved(variable: Any, prefix: str) -> str:
    """The name that the variable is saved under; `prefix` is put before that of what belonged to a tower. Local."""
    place = locate(variable)
    return place.name if place.tower is None else prefix + place.name


def group(
    variables: Sequence[Any],
    aliases: Mapping[int, str],
    prefix: str,
    dtype_of: Callable[[Any], tf.DType] = check.dtype_of,
) -> list[Saved]:
    """Variables by the name that they are saved under, sorted by it; masters before towers, lower towers first. Local.

    `aliases` name variables (by their id) that do not say in their own name where they belong. `prefix` is put before
    the names of what belonged to a tower. `dtype_of` a variable is that in which its value is saved.
    """
    found: dict[str, list[tuple[Any, Any]]] = {}
    for variable in variables:
        place = locate(variable)
        name = aliases.get(id(variable)) or name_saved(variable, prefix)
        order = (not place.master, int(place.tower or 0))
        found.setdefault(name, []).append((order, variable))
    saved = []
    for name in sorted(found):
        sames = [variable for _, variable in sorted(found[name], key=lambda one: one[0])]
        saved.append(Saved(name, sames[0], tuple(sames), dtype_of(sames[0])))
    return saved


def agree(function: str, saved: Sequence[Saved], partly: bool) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of what rank 0 saves, after a comparison of all ranks; with `partly` others may lack some.

    Collective: every rank of the group calls it in the same order, while the graph is built.

    Raises:
        ValueError: a rank has what rank 0 lacks, or lacks or has otherwise what rank 0 has; on every rank alike.
    """
    mine = {one.name: [check.shape_of(one.source).as_list(), one.dtype.name] for one in saved}
    meeting.take_turn(function, f"{function} (variables: {len(mine)})")
    ranks = meeting.gather_objects(mine, "savable")
    problems = []
    for rank, other in enumerate(ranks):
        for name in sorted({*ranks[0], *other}):
            first, here = ranks[0].get(name), other.get(name)
            if first != here and (first is None or here is not None or not partly):
                problems.append(f"{name}: {_shown(first)} on rank 0, {_shown(here)} on rank {rank}")
    if problems:
        raise ValueError(
            f"{function}: the ranks have different variables.\n  "
            + "\n  ".join(problems[:_MOST_SHOWN])
            + "\nEvery rank must build the same graph."
        )
    return [(name, tuple(shape), dtype) for name, (shape, dtype) in sorted(ranks[0].items())]


def _shown(described: Sequence[Any] | None) -> str:
    return "none" if described is None else f"{described[1]} {tuple(described[0])}"


def spread(name: str, listed: Sequence[tuple[str, tuple[int, ...], str]], saved: Sequence[Saved]) -> list[Any]:
    """Operations that give every variable here the value that rank 0 saves under its name.

    `listed` is what `agree` gave. Collective when they run: every rank of the group runs all of them, once.
    """
    known = {one.name: one for one in saved}
    values = [
        tf.cast(known[key].source.read_value(), dtype) if key in known else tf.zeros(shape, dtype)
        for key, shape, dtype in listed
    ]
    for key, _, dtype in listed:
        wire.transfer_type("broadcast", tf.as_dtype(dtype), key)
    operations: list[Any] = []
    for index, value in _broadcast(name, [row[1:] for row in listed], values, 0):
        one = known.get(listed[index][0])
        # Used on every rank, so that the collective runs there.
        operations.append(value.op)
        for target in one.targets if one is not None else ():
            if world().rank or (one is not None and target is not one.source):
                operations.append(target.assign(tf.cast(value, check.dtype_of(target)), read_value=False))
    return operations


def collect(
    name: str, rows: Sequence[tuple[str, int, tuple[int, ...], str]], variables: Mapping[str, Any]
) -> list[Any]:
    """Operations that bring values to rank 0: of each row's name, from the rank that holds it.

    `rows` (name, rank, shape, dtype) are equal on all ranks; `variables` are this rank's, by their names.
    Collective when they run: every rank of the group runs all of them.
    """
    operations: list[Any] = []
    for holder in sorted({row[1] for row in rows} - {0}):
        here = [row for row in rows if row[1] == holder]
        values = [
            variables[key].read_value() if key in variables else tf.zeros(shape, dtype) for key, _, shape, dtype in here
        ]
        for index, value in _broadcast(f"{name}.{holder}", [row[2:] for row in here], values, holder):
            operations.append(value.op)
            if world().rank == 0:
                operations.append(variables[here[index][0]].assign(value, read_value=False))
    return operations


def _broadcast(
    name: str, described: Sequence[tuple[tuple[int, ...], str]], values: Sequence[tf.Tensor], root: int
) -> list[tuple[int, tf.Tensor]]:
    """Pairs of index and the root's value, packed on the way; what has no elements is left out."""
    shapes, dtypes = [shape for shape, _ in described], [dtype for _, dtype in described]
    plan = fusion.plan(shapes, dtypes, small_bytes=None, max_bytes=_MOST_BYTES)
    pairs = []
    for number, bucket in enumerate(plan.buckets):
        received = collectives.broadcast(fusion.fill(bucket, values), root, f"{name}.{number}")
        for place, value in zip(bucket.places, fusion.cut(received, bucket.places), strict=True):
            pairs.append((place.index, value))
    return pairs
