"""Gradients of several towers (replicas in one graph) summed or averaged: plainly, by device, or by halves.

Everything here is local to the process and builds ops in the current graph. A `tower_grads` is a list over towers;
each tower's list is in the order of the variables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdvars import scaling, sparse
from hvdvars.types import Gradient

# Where GCP's eight V100 have their links between the halves; a tensor's main towers go through these in turn.
_GCP_V100_MAINS = ((0, 5), (2, 7), (5, 0), (7, 2))


def sum_towers(gradients: Sequence[Gradient]) -> Gradient:
    """The sum of one variable's gradients over the towers.

    None counts as zeros, and the sum is None where all are. Slices alone are joined, their rows not yet added; slices
    beside tensors become dense. One gradient is the sum itself. Local.
    """
    present = [_flat(gradient) for gradient in gradients if gradient is not None]
    if len(present) < 2:
        return present[0] if present else None
    dense = next((gradient for gradient in present if not isinstance(gradient, tf.IndexedSlices)), None)
    if dense is None:
        return sparse.concat(present)
    shape = dense.shape if dense.shape.is_fully_defined() else tf.shape(dense)
    return tf.add_n([sparse.to_dense(g, shape) if isinstance(g, tf.IndexedSlices) else g for g in present])


def sum_all_towers(tower_grads: Sequence[Sequence[Gradient]], devices: Sequence[str] = ()) -> list[Gradient]:
    """`sum_towers` for every variable, the i-th on device i, counted around.

    No devices, or an empty name, leave the placement as it is. Local. Raises ValueError if towers' lists differ in
    length, or there are no towers.
    """
    sums = []
    for index, gradients in enumerate(_by_variable("sum_all_towers", tower_grads)):
        with _on(devices[index % len(devices)] if devices else ""):
            sums.append(sum_towers(gradients))
    return sums


def sum_hierarchically(tower_grads: Sequence[Sequence[Gradient]], topology: Any = "dgx1") -> list[list[Gradient]]:
    """The sums for each tower, on its own device: within each half of the towers, between the halves, and back.

    Each variable has a main tower in each half, in turn, so that all links are used. `topology` is `dgx1` (any number
    of towers) or `gcp_v100` (eight), or an enum of that name or value. Local.

    Raises:
        ValueError: another topology, another number of towers than it has, or towers' lists that differ in length.
    """
    columns = _by_variable("sum_hierarchically", tower_grads)
    towers = len(tower_grads)
    mains_of = _mains(topology, towers)
    if towers == 1:
        return [[_flat(gradient) for gradient in tower_grads[0]]]
    devices = [next((g.device for g in gradients if g is not None), "") for gradients in tower_grads]
    rows = [_sum_halves(gradients, devices, *mains_of(index)) for index, gradients in enumerate(columns)]
    return [[row[tower] for row in rows] for tower in range(towers)]


def aggregate_gradients_using_copy(
    tower_grads: Sequence[Sequence[Any]], use_mean: bool, check_inf_nan: bool
) -> tuple[list[tuple[Gradient, Any]], tf.Tensor | None]:
    """Each variable's gradient over all towers with the first tower's variable, and whether any is infinite or NaN.

    `tower_grads` has (gradient, variable) pairs. The flag is a bool scalar, or None without `check_inf_nan`. Local.
    Raises ValueError if towers' lists differ in length, or there are no towers.
    """
    columns = _by_variable("aggregate_gradients_using_copy", tower_grads)
    return _aggregate(columns, [""], use_mean, check_inf_nan)


def aggregate_gradients_using_copy_with_variable_colocation(
    tower_grads: Sequence[Sequence[Any]], use_mean: bool, check_inf_nan: bool
) -> tuple[list[tuple[Gradient, Any]], tf.Tensor | None]:
    """As `aggregate_gradients_using_copy`, each variable's on that variable's device. Local.

    Raises ValueError also where towers have different variables.
    """
    function = "aggregate_gradients_using_copy_with_variable_colocation"
    columns = _by_variable(function, tower_grads)
    for index, pairs in enumerate(columns):
        other = next((tower for tower, (_, var) in enumerate(pairs) if var is not pairs[0][1]), None)
        if other is not None:
            raise ValueError(
                f"{function}: variable {index} is {pairs[0][1]!r} in tower 0 and {pairs[other][1]!r} in tower {other}; "
                "all towers must share it: use aggregate_gradients_using_copy where each tower has its own"
            )
    return _aggregate(columns, [pairs[0][1].device for pairs in columns], use_mean, check_inf_nan)


def aggregate_gradients_using_copy_with_device_selection(
    benchmark_cnn: Any, tower_grads: Sequence[Sequence[Any]], use_mean: bool, check_inf_nan: bool
) -> tuple[list[tuple[Gradient, Any]], tf.Tensor | None]:
    """As `aggregate_gradients_using_copy`, on the devices that `benchmark_cnn` names. Local.

    These are its `raw_devices` in turn if its `local_parameter_device_flag` is `gpu`, else its `param_server_device`.
    """
    columns = _by_variable("aggregate_gradients_using_copy_with_device_selection", tower_grads)
    on_gpus = benchmark_cnn.local_parameter_device_flag == "gpu"
    devices = benchmark_cnn.raw_devices if on_gpus else [benchmark_cnn.param_server_device]
    return _aggregate(columns, devices, use_mean, check_inf_nan)


def aggregate_single_gradient_using_copy(
    grad_and_vars: Sequence[tuple[Gradient, Any]], use_mean: bool, check_inf_nan: bool
) -> tuple[tuple[Gradient, Any], tf.Tensor | None]:
    """One variable's gradient over all towers with the first tower's variable, and whether it is infinite or NaN.

    The flag is None without `check_inf_nan`; it looks at the sum, which also tells where adding went beyond the dtype.
    A tower with None counts in the mean. Local. Raises TypeError for the mean of integers, which would be rounded.
    """
    total = sum_towers([grad for grad, _ in grad_and_vars])
    flag = tf.logical_not(scaling.all_finite([total])) if check_inf_nan else None
    if use_mean and len(grad_and_vars) > 1 and total is not None:
        if not (total.dtype.is_floating or total.dtype.is_complex):
            raise TypeError(
                f"aggregate_single_gradient_using_copy: gradients of {total.dtype.name} have no exact mean; "
                "use use_mean=False for the sum"
            )
        total = tf.math.scalar_mul(1.0 / len(grad_and_vars), total)
    return (total, grad_and_vars[0][1]), flag


def aggregate_indexed_slices_gradients(grads: Sequence[Gradient]) -> Gradient:
    """The sum of one variable's gradients, some of them slices: the original's name for `sum_towers`. Local."""
    return sum_towers(grads)


def flatten_nested_indexed_slices(grad: tf.IndexedSlices) -> tf.IndexedSlices:
    """Slices whose values are tensors, from slices of slices (of slices …), as a gather of a gather has. Local."""
    if not isinstance(grad.values, tf.IndexedSlices):
        return grad
    inner = flatten_nested_indexed_slices(grad.values)
    return tf.IndexedSlices(inner.values, tf.gather(grad.indices, inner.indices), grad.dense_shape)


def _flat(gradient: Gradient) -> Gradient:
    return flatten_nested_indexed_slices(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def _aggregate(
    columns: list[tuple[Any, ...]], devices: Sequence[str], use_mean: bool, check_inf_nan: bool
) -> tuple[list[tuple[Gradient, Any]], tf.Tensor | None]:
    pairs, flags = [], []
    for index, column in enumerate(columns):
        with _on(devices[index % len(devices)]):
            pair, flag = aggregate_single_gradient_using_copy(column, use_mean, check_inf_nan)
        pairs.append(pair)
        flags.append(flag)
    if not check_inf_nan:
        return pairs, None
    return pairs, tf.reduce_any(tf.stack(flags)) if flags else tf.constant(False)


def _sum_halves(gradients: Sequence[Gradient], devices: Sequence[str], main: int, other: int) -> list[Gradient]:
    """One variable's sum for each tower: `main` and `other` gather for the half that each is in."""
    half = len(gradients) // 2
    main_is_lower = main < half
    lower, upper = gradients[:half], gradients[half:]
    with _on(devices[main]):
        own = sum_towers(lower if main_is_lower else upper)
    with _on(devices[other]):
        theirs = sum_towers(upper if main_is_lower else lower)
    with _on(devices[main]):
        total = sum_towers([own, theirs])
    far = _copy(total, devices[other])
    return [_copy(total if (t < half) == main_is_lower else far, device) for t, device in enumerate(devices)]


def _mains(topology: Any, towers: int) -> Callable[[int], tuple[int, int]]:
    """Which two towers are the main ones for the i-th variable; the first adds the two halves."""
    names = {str(getattr(topology, part, topology)).lower() for part in ("value", "name")}
    half = towers // 2
    if "dgx1" in names:

        def in_turn(index: int) -> tuple[int, int]:
            main = index % towers
            return main, main + half if main < half else (main - half) % half

        return in_turn
    if "gcp_v100" not in names:
        raise ValueError(f"sum_hierarchically: expected the topology 'dgx1' or 'gcp_v100', got {topology!r}")
    if towers not in (1, 8):
        raise ValueError(f"sum_hierarchically: 'gcp_v100' has 8 towers, got {towers}; use 'dgx1' for other numbers")
    return lambda index: _GCP_V100_MAINS[index % len(_GCP_V100_MAINS)]


def _copy(gradient: Gradient, device: str) -> Gradient:
    with _on(device):
        return None if gradient is None else tf.identity(gradient)


def _by_variable(function: str, tower_grads: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """A tuple over the towers for each variable."""
    lengths = [len(tower) for tower in tower_grads]
    if len(set(lengths)) != 1:
        raise ValueError(
            f"{function}: expected one list of gradients for each tower, all of one length, got lengths {lengths}; "
            "give None where a tower has no gradient"
        )
    return list(zip(*tower_grads, strict=True))


def _on(device: Any) -> Any:
    """The scope of a device, which may be a device function; none for an empty name."""
    return tf.compat.v1.device(device) if device else contextlib.nullcontext()
