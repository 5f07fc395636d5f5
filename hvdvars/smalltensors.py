"""Small gradients of each tower packed into larger ones, grouped as tf_cnn_benchmarks does it.

What is packed: float32 gradients of at most `max_bytes` that follow each other in the first tower's list. Everything
here builds ops in the current graph and is local.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

PLACEHOLDER = "packing_var_placeholder"
"""Stands in the variable's place beside a packed gradient, which belongs to several variables."""


class GradPackTuple(NamedTuple):
    """What one packed gradient is made of: places in the tower's list, variables and static shapes, aligned."""

    indices: range
    vars: list[Any]
    shapes: list[tf.TensorShape]


def extract_ranges(index_list: Sequence[int], range_size_limit: int = 32) -> tuple[list[list[int]], list[int]]:
    """Runs of consecutive indices as `[first, last]`, and the indices that stand alone; both in order.

    A run ends once its last index is more than `range_size_limit` above its first, so that it has at most
    `range_size_limit` + 2 indices; the rest of a longer one starts the next. Local.
    Raises ValueError unless the indices ascend.
    """
    runs: list[list[int]] = []
    for index in index_list:
        if runs and index <= runs[-1][1]:
            raise ValueError(f"extract_ranges: indices must ascend, but {index} comes after {runs[-1][1]}; sort them")
        if runs and index == runs[-1][1] + 1 and runs[-1][1] - runs[-1][0] <= range_size_limit:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return [run for run in runs if run[0] < run[1]], [run[0] for run in runs if run[0] == run[1]]


def pack_range(key: str, packing: dict[str, GradPackTuple], grad_vars: Sequence[Any], rng: Sequence[int]) -> tf.Tensor:
    """One flat tensor of the gradients `rng[0]` to `rng[1]`, both included, on the first one's device.

    `grad_vars` are one tower's (gradient, variable) pairs. How to take it apart is left in `packing[key]`. Local.
    Raises ValueError for a range outside of the list, TypeError for gradients that are no tensors.
    """
    first, last = rng
    if not 0 <= first <= last < len(grad_vars):
        raise ValueError(f"pack_range: expected a range within 0 to {len(grad_vars) - 1}, got {first} to {last}")
    members = grad_vars[first : last + 1]
    for index, (grad, _) in enumerate(members, first):
        if not isinstance(grad, tf.Tensor):
            raise TypeError(f"pack_range: gradient {index} must be a tensor, got {grad!r}; leave it out of the range")
    packing[key] = GradPackTuple(
        range(first, last + 1), [var for _, var in members], [grad.shape for grad, _ in members]
    )
    with tf.name_scope("pack"):
        flat = []
        for grad, _ in members:
            with tf.device(grad.device):
                flat.append(tf.reshape(grad, [-1]))
        with tf.device(flat[0].device):
            return tf.concat(flat, 0)


def unpack_grad_tuple(gv: Sequence[Any], gpt: GradPackTuple) -> list[tuple[tf.Tensor, Any]]:
    """The (gradient, variable) pairs that `gpt` says are in the packed `gv`, on its device. Local.

    Raises ValueError if the packed gradient has another size.
    """
    packed = gv[0]
    sizes = [shape.num_elements() for shape in gpt.shapes]
    if None in sizes or not packed.shape.is_compatible_with([sum(sizes)]):
        raise ValueError(
            f"unpack_grad_tuple: expected a flat gradient of the sizes {sizes}, got the shape {packed.shape}; "
            "unpack with what the same list was packed with"
        )
    with tf.device(packed.device), tf.name_scope("unpack"):
        pieces = tf.split(packed, sizes)
        return [(tf.reshape(piece, shape), var) for piece, shape, var in zip(pieces, gpt.shapes, gpt.vars, strict=True)]


def pack_small_tensors(
    tower_grads: Sequence[Sequence[Any]], max_bytes: int = 0, max_group: int = 0
) -> tuple[Any, dict[str, GradPackTuple] | None]:
    """The towers with runs of small gradients replaced by packed ones, which come first; and how to undo it.

    `tower_grads` has a list of (gradient, variable) pairs for each tower. Runs are those of `extract_ranges` with
    `max_group`; a small gradient that stands alone stays as it is, and so do None and `tf.IndexedSlices`. The second
    result is None, and the first is `tower_grads` itself, where there is nothing to pack. Local.

    Raises:
        ValueError: there are no towers, or a tower's list differs from the first one's.
    """
    if not tower_grads:
        raise ValueError("pack_small_tensors: expected the gradients of at least one tower, got none")
    first = tower_grads[0]
    small = [index for index, (grad, _) in enumerate(first) if _is_small(grad, max_bytes)]
    ranges, _ = extract_ranges(small, max_group)
    if not ranges:
        return tower_grads, None
    packed = {index for begin, end in ranges for index in range(begin, end + 1)}
    packing: dict[str, GradPackTuple] = {}
    packed_towers = []
    for tower, pairs in enumerate(tower_grads):
        _check_tower(tower, pairs, first, packed)
        fused = [
            (pack_range(f"{tower}:{number}", packing, pairs, rng), PLACEHOLDER) for number, rng in enumerate(ranges)
        ]
        packed_towers.append(fused + [pair for index, pair in enumerate(pairs) if index not in packed])
    return packed_towers, packing


def unpack_small_tensors(tower_grads: Sequence[Sequence[Any]], packing: dict[str, GradPackTuple] | None) -> Any:
    """Undo `pack_small_tensors`: every gradient in its old place, beside its variable.

    Without `packing` the result is `tower_grads` itself. Local.

    Raises:
        ValueError: `packing` was made for other towers or other lists.
    """
    if not packing:
        return tower_grads
    towers = len(tower_grads)
    count = len(packing) // max(towers, 1)
    keys = [[f"{tower}:{number}" for number in range(count)] for tower in range(towers)]
    if {key for row in keys for key in row} != set(packing) or any(len(pairs) < count for pairs in tower_grads):
        raise ValueError(
            f"unpack_small_tensors: {towers} towers of {[len(pairs) for pairs in tower_grads]} gradients do not fit "
            f"the packing of {sorted(packing)}; give what pack_small_tensors returned with it"
        )
    return [_unpack_tower(pairs, [packing[key] for key in row]) for pairs, row in zip(tower_grads, keys, strict=True)]


def _unpack_tower(pairs: Sequence[Any], packed: list[GradPackTuple]) -> list[Any]:
    placed: dict[int, Any] = {}
    for pair, gpt in zip(pairs, packed, strict=False):
        placed.update(zip(gpt.indices, unpack_grad_tuple(pair, gpt), strict=True))
    others = iter(pairs[len(packed) :])
    return [
        placed[index] if index in placed else next(others) for index in range(len(pairs) - len(packed) + len(placed))
    ]


def _is_small(grad: Any, max_bytes: int) -> bool:
    if not isinstance(grad, tf.Tensor) or grad.dtype != tf.float32:
        return False
    elements = grad.shape.num_elements()
    return elements is not None and grad.dtype.size * elements <= max_bytes


def _check_tower(tower: int, pairs: Sequence[Any], first: Sequence[Any], packed: set[int]) -> None:
    if len(pairs) != len(first):
        raise ValueError(
            f"pack_small_tensors: tower 0 has {len(first)} gradients and tower {tower} has {len(pairs)}; "
            "give each tower the same list, with None where there is no gradient"
        )
    for index in sorted(packed):
        wanted, got = first[index][0], pairs[index][0]
        if not isinstance(got, tf.Tensor) or (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
            raise ValueError(
                f"pack_small_tensors: gradient {index} of tower {tower} is {got!r}, expected a tensor like tower 0's: "
                f"{wanted.dtype.name} of shape {wanted.shape}"
            )
