"""Towers of modes without owners, in graphs of TensorFlow 1: each has variables of its own and applies updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvdvars import check, getters, reduce, savable, scaling, sparse, towers
from hvdvars.manager import Use, device_of
from hvdvars.options import Options
from hvdvars.towermgr import TowerMgr
from hvdvars.types import Gradient


class IndependentTowers(TowerMgr):
    """Every tower applies its own gradients; nothing is sent, in the process or between ranks."""

    def preprocess_device_grads(self, device_grads: Sequence[Sequence[tuple[Gradient, Any]]]) -> tuple[list[Any], Any]:
        """See `TowerMgr`. The state are the gradients themselves. Local."""
        return self.benchmark_cnn.devices, device_grads

    def get_gradients_to_apply(self, device_num: int, gradient_state: Any) -> list[tuple[Gradient, Any]]:
        """See `TowerMgr`. The loss scale follows the first tower's gradients. Local. Raises ValueError as there."""
        pairs = _of_tower(device_num, gradient_state)
        if self.benchmark_cnn.enable_auto_loss_scale and device_num == 0:
            self.grad_has_inf_nan = tf.logical_not(scaling.all_finite([gradient for gradient, _ in pairs]))
        return pairs

    def _saved(self) -> list[savable.Saved]:
        # No tower stands for another: those after the first are saved under their whole names.
        saved = []
        for one in super()._saved():
            first, *others = one.targets
            saved.append(replace(one, targets=(first,)))
            saved += [replace(one, name=check.name_of(other), source=other, targets=(other,)) for other in others]
        return saved

    def get_post_init_ops(self) -> list[Any]:
        """Nothing: every rank and every tower keeps its own values. Local."""
        return []


class AllReduceTowers(TowerMgr):
    """Gradients are summed over all replicas; every tower applies the sums to its own variables.

    With `variable_consistency="relaxed"` the sums are those of the step before, zeros first.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._warmup_ops: list[Any] = []

    def preprocess_device_grads(self, device_grads: Sequence[Sequence[tuple[Gradient, Any]]]) -> tuple[list[Any], Any]:
        """See `TowerMgr`. The state has the reduced gradients, for each tower with its own variables. Collective."""
        use, sums = self._tower_use("preprocess_device_grads", device_grads, self._add_towers)
        puts: list[Any] = []
        if self.options.variable_consistency == "relaxed":
            sums, puts = self._defer(use, sums)
        with device_of(self.options):
            reduced = reduce.reduce_gradients(use.whole, sums)
        if puts:
            with tf.control_dependencies(puts):
                reduced = [sparse.map_values(_same, gradient) for gradient in reduced]
        if self.benchmark_cnn.enable_auto_loss_scale:
            self.grad_has_inf_nan = tf.logical_not(scaling.all_finite(reduced))
        state = [[(g, v) for g, (_, v) in zip(reduced, tower, strict=True)] for tower in device_grads]
        return self.benchmark_cnn.devices, state

    def get_gradients_to_apply(self, device_num: int, gradient_state: Any) -> list[tuple[Gradient, Any]]:
        """See `TowerMgr`. Local. Raises ValueError where there is no such tower."""
        return _of_tower(device_num, gradient_state)

    def get_post_init_ops(self) -> list[Any]:
        """See `TowerMgr`; and the zeros that wait before the first step, if gradients are late. Collective."""
        return [*super().get_post_init_ops(), *self._warmup_ops]

    def _add_towers(self, gradients: list[list[Gradient]]) -> list[Gradient]:
        if self.options.hierarchical_copy:
            return towers.sum_hierarchically(gradients, self._topology())[0]
        return towers.sum_all_towers(gradients, self._sum_devices())

    def _topology(self) -> Any:
        local = self.benchmark_cnn
        return getattr(getattr(local, "params", local), "network_topology", None) or "dgx1"

    def _sum_devices(self) -> list[str]:
        local = self.benchmark_cnn
        return list(local.raw_devices) if local.local_parameter_device_flag == "gpu" else [local.cpu_device]

    def _defer(self, use: Use, sums: list[Gradient]) -> tuple[list[Gradient], list[Any]]:
        """What was summed up the step before, and the operations that keep these sums for the next."""
        planned = reduce.as_planned(use.whole, sums)
        present = [index for index, gradient in enumerate(planned) if gradient is not None]
        values, shapes, zeros = [], [], []
        for index in present:
            for value, shape in _parts(planned[index], use.whole.forms[index].shape):
                values.append(value)
                shapes.append(shape)
                zeros.append(tf.zeros([0 if size is None else size for size in shape], value.dtype))
        if not values:
            return planned, []
        put, got, warm_up = getters.stage(values, [tf.TensorShape(shape) for shape in shapes], zeros)
        here = [one for one in self._warmup_ops if one.graph is put.graph]
        self._warmup_ops = [*here, warm_up]
        rest = iter(got)
        for index in present:
            if isinstance(planned[index], tf.IndexedSlices):
                whole = tf.constant(use.whole.forms[index].shape, tf.int64)
                planned[index] = tf.IndexedSlices(next(rest), next(rest), whole)
            else:
                planned[index] = next(rest)
        return planned, [put]


def _parts(gradient: Any, shape: tuple[int, ...]) -> list[tuple[tf.Tensor, tuple[int | None, ...]]]:
    if isinstance(gradient, tf.IndexedSlices):
        return [(gradient.values, (None, *shape[1:])), (tf.cast(gradient.indices, tf.int64), (None,))]
    return [(gradient, shape)]


def _of_tower(device_num: int, gradient_state: Any) -> list[tuple[Gradient, Any]]:
    if not 0 <= device_num < len(gradient_state):
        raise ValueError(
            f"get_gradients_to_apply: device_num must be from 0 to {len(gradient_state) - 1}, got {device_num}"
        )
    return list(gradient_state[device_num])


def _same(values: tf.Tensor) -> tf.Tensor:
    return tf.identity(values, name="control_dependency")
