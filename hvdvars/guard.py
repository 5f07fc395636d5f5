"""Proof that all ranks do the same: signatures compared before the first step, values compared on request."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdvars import check, collectives, meeting, optimizer
from hvdvars.session import require_started, world
from hvdvars.types import Variable

_MOST_SHOWN = 8


def exchange(function: str, settings: Mapping[str, Any], tensors: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Compare what the ranks are about to do, and give every rank's `tensors`, in rank order.

    `settings` are named values that must be equal on all ranks; `tensors` describe the variables, each with `name`,
    `shape` and `dtype` (compared) and whatever else the caller wants to know of the other ranks.

    Collective: every rank of the group calls it in the same order, outside of graphs or while one is traced.

    Raises:
        ValueError: on every rank alike, naming the first differences, the ranks and both values.
    """
    mine = {"function": function, "settings": dict(settings), "tensors": [dict(tensor) for tensor in tensors]}
    meeting.take_turn("exchange", f"{function} (variables: {len(tensors)})")
    ranks = meeting.gather_objects(mine, "exchange")
    problems: list[str] = []
    for rank, other in enumerate(ranks[1:], start=1):
        problems += _differences(ranks[0], other, rank)
    if problems:
        shown = problems[:_MOST_SHOWN] + ([f"… and {len(problems) - _MOST_SHOWN} more"] if len(problems) > 8 else [])
        raise ValueError(
            f"{function}: the ranks do not agree, so nothing was sent.\n  " + "\n  ".join(shown) + "\nEvery rank must "
            "create the same variables in the same order and use the same mode and options."
        )
    return [rank["tensors"] for rank in ranks]


def _differences(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> list[str]:
    if first["function"] != other["function"]:
        return [f"rank 0 is in {first['function']}, rank {rank} is in {other['function']}"]
    found = [
        f"{name} is {first['settings'].get(name)!r} on rank 0 and {other['settings'].get(name)!r} on rank {rank}"
        for name in sorted({*first["settings"], *other["settings"]})
        if first["settings"].get(name) != other["settings"].get(name)
    ]
    mine, theirs = first["tensors"], other["tensors"]
    if len(mine) != len(theirs):
        return [*found, f"rank 0 has {len(mine)} variables, rank {rank} has {len(theirs)}"]
    for index, (one, two) in enumerate(zip(mine, theirs, strict=True)):
        for part in ("shape", "dtype"):
            if one[part] != two[part]:
                found.append(
                    f"variables[{index}] ({one['name']}) has {part} {one[part]} on rank 0 and {two[part]} on rank "
                    f"{rank} (where it is {two['name']})"
                )
    names = [canonical_names([tensor["name"] for tensor in tensors]) for tensors in (mine, theirs)]
    for index, (one_name, two_name) in enumerate(zip(*names, strict=True)):
        if one_name != two_name:
            found.append(
                f"variables[{index}] is {mine[index]['name']} on rank 0 and {theirs[index]['name']} on rank {rank}"
            )
    return found


def canonical_names(names: Sequence[str]) -> list[str]:
    """Names with the counters that TensorFlow and Keras append (`dense_7`) replaced by their order of size. Local.

    A rank that built another model before has `dense_5`, `dense_6` where the others have `dense`, `dense_1`; one that
    built its layers in another order still differs.
    """
    split = [[re.fullmatch(r"(.*?)(?:_(\d+))?", part) for part in name.split("/")] for name in names]
    counters: dict[str, set[int]] = {}
    for parts in split:
        for match in parts:
            counters.setdefault(match[1], set()).add(int(match[2] or 0))  # type: ignore[index]
    order = {base: {count: k for k, count in enumerate(sorted(counts))} for base, counts in counters.items()}
    return ["/".join(f"{m[1]}#{order[m[1]][int(m[2] or 0)]}" for m in parts) for parts in split]  # type: ignore[index]


def verify(variables: Any, hint: str = "", function: str = "verify") -> None:
    """Raise on every rank unless each variable has the same bits on all ranks.

    `variables` is a list. Digests are compared, so that little is sent. `hint` is added to the message, which begins
    with `function`.

    Collective: every rank of the group calls it in the same order, outside of graphs.

    Raises:
        ValueError: names, shapes or dtypes differ, as in the start of a run.
        RuntimeError: values differ; names the variables and the ranks that disagree with rank 0. Or a graph of
            TensorFlow 1, where values belong to a session.
    """
    require_started("verify")
    variables = check.check_variables("verify", variables)
    with tf.init_scope():
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{function} works in eager mode; in a graph of TensorFlow 1 compare what a session gives"
            )
        mine = [{**describe(variable), "digest": _digest(variable)} for variable in variables]
    ranks = exchange(function, {}, mine)
    wrong: list[str] = []
    for index, variable in enumerate(variables):
        digests = [tensors[index]["digest"] for tensors in ranks]
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            what = f"{check.name_of(variable)} {tuple(variable.shape)}"
            wrong.append(f"{what}: ranks {_listed(others)} differ from rank 0")
    if wrong:
        shown = wrong[:_MOST_SHOWN] + ([f"… and {len(wrong) - _MOST_SHOWN} more"] if len(wrong) > _MOST_SHOWN else [])
        raise RuntimeError(
            f"{function}: {len(wrong)} of {len(variables)} variables are not equal on all {world().size} ranks.\n  "
            + "\n  ".join(shown)
            + (f"\n{hint}" if hint else "")
        )


def describe(variable: Variable) -> dict[str, Any]:
    """A variable's `name`, `shape` and `dtype`, as `exchange` compares them. Local."""
    shape = check.shape_of(variable)
    return {
        "name": check.name_of(variable),
        "shape": None if shape.rank is None else shape.as_list(),
        "dtype": check.dtype_of(variable).name,
    }


def _digest(variable: Variable) -> str:
    value = np.ascontiguousarray(tf.convert_to_tensor(optimizer.tf_variable(variable)).numpy())
    data = repr(value.tolist()).encode() if value.dtype == object else value.reshape(-1).view(np.uint8).data
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks[:_MOST_SHOWN]) + (" …" if len(ranks) > _MOST_SHOWN else "")


def verify_in_graph(variables: Sequence[Variable], name: str) -> tf.Operation:
    """An operation that fails on every rank where a variable's bits differ between ranks: a sum over them is compared.

    Collective when it runs: every rank of the group runs it in the same step.
    """
    sums = tf.stack([_bit_sum(tf.convert_to_tensor(optimizer.tf_variable(variable))) for variable in variables])
    ranks = tf.reshape(collectives.all_gather(sums, name), [world().size, len(variables)])
    same = tf.reduce_all(tf.equal(ranks, ranks[:1]), axis=0)
    names = tf.constant([check.name_of(variable) for variable in variables])
    return tf.debugging.Assert(
        tf.reduce_all(same),
        ["verify_every: these variables are not equal on all ranks:", tf.boolean_mask(names, tf.logical_not(same))],
        summarize=_MOST_SHOWN,
    )


def _bit_sum(value: tf.Tensor) -> tf.Tensor:
    """A sum of the bits, weighted by place so that a permutation of a variable is not taken for the variable."""
    if value.dtype.is_complex:
        value = tf.bitcast(value, value.dtype.real_dtype)
    if value.dtype == tf.bool:
        value = tf.cast(value, tf.uint8)
    same_width = {1: tf.uint8, 2: tf.uint16, 4: tf.int32, 8: tf.int64}[value.dtype.size]
    bits = tf.reshape(value if value.dtype == same_width else tf.bitcast(value, same_width), [-1])
    bits = bits if bits.dtype in (tf.int32, tf.int64) else tf.cast(bits, tf.int32)
    weights = tf.range(tf.size(bits, out_type=bits.dtype), dtype=bits.dtype) * 2 + 1
    return tf.cast(tf.reduce_sum(bits * weights), tf.int64)
