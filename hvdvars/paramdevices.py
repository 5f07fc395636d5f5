"""Which device holds a variable in a graph of `tf.compat.v1`: the one that holds least so far.

Device functions for `tf.compat.v1.device`, and the load of an op. No communication: one process's own devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# The last one is what resource variables are made of; its output is a handle without the variable's shape.
_VARIABLES = ("Variable", "VariableV2", "VarHandleOp")


class ParamServerDeviceSetter:
    """Variables go to the least loaded of `ps_devices`, all other ops to `worker_device`.

    A device function, for `tf.compat.v1.device` (`tf.device` takes none). The load is the number of elements; ties go
    to the earlier device. An op that has a device keeps it.
    """

    def __init__(self, worker_device: str, ps_devices: Sequence[str]):
        if not ps_devices:
            raise ValueError("ParamServerDeviceSetter: expected at least one device in ps_devices, got none")
        self.worker_device = worker_device
        self.ps_devices = ps_devices
        self.ps_sizes = [0] * len(ps_devices)

    def __call__(self, op: tf.Operation) -> str:
        """The device for this op. A variable of unknown shape adds no load. Local."""
        if op.device:
            return op.device
        if op.type not in _VARIABLES:
            return self.worker_device
        least = self.ps_sizes.index(min(self.ps_sizes))
        self.ps_sizes[least] += _shape_of(op).num_elements() or 0
        return self.ps_devices[least]


class GreedyLoadBalancingStrategy:
    """A `ps_strategy` for `tf.compat.v1.train.replica_device_setter`: each op to the task with the least load so far.

    `load_fn(op)` gives the load that an op adds; ties go to the lower task.
    """

    def __init__(self, num_tasks: int, load_fn: Callable[[Any], float]):
        if num_tasks < 1:
            raise ValueError(f"GreedyLoadBalancingStrategy: expected at least one task, got num_tasks={num_tasks}")
        self._loads: list[float] = [0] * num_tasks
        self._load_fn = load_fn

    def __call__(self, op: tf.Operation) -> int:
        """The task for this op, whose load it has from now on. Local."""
        load = self._load_fn(op)
        task = self._loads.index(min(self._loads))
        self._loads[task] += load
        return task


def byte_size_load_fn(op: tf.Operation) -> int:
    """The bytes of a variable, or of the one output of any other op. Local.

    Raises ValueError if the op has another number of outputs, or a shape that is not fully known.
    """
    if len(op.outputs) != 1:
        raise ValueError(f"byte_size_load_fn: {op.name} ({op.type}) has {len(op.outputs)} outputs, expected one")
    shape = _shape_of(op)
    if not shape.is_fully_defined():
        raise ValueError(
            f"byte_size_load_fn: {op.name} ({op.type}) has the shape {shape}, which is not fully known; "
            "give the variable a static shape"
        )
    dtype = op.get_attr("dtype") if op.type in _VARIABLES else op.outputs[0].dtype
    return shape.num_elements() * dtype.size


def _shape_of(op: tf.Operation) -> tf.TensorShape:
    # Outputs of variables say less than their attribute: handles are scalars, and old scalars have an unknown shape.
    return tf.TensorShape(op.get_attr("shape")) if op.type in _VARIABLES else op.outputs[0].shape
