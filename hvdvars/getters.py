"""Getters for variable scopes of TensorFlow 1: on which device a variable is cached, in which collection it is, and
who reads it through a staging area.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

v1 = tf.compat.v1

SHADOW_PREFIX = "ps_var"
"""Scope of the master copies."""


class OverrideCachingDevice:
    """Caches each variable on one device: small ones (in elements) on one of their own, others where least is cached.

    Local. One getter for each tower: all of them then choose alike, since they see the variables in the same order.
    """

    def __init__(
        self, devices: Sequence[str], device_for_small_variables: str, small_variable_size_threshold: int
    ) -> None:
        self.devices = list(devices)
        self.sizes = [0] * len(self.devices)
        self.device_for_small_variables = device_for_small_variables
        self.small_variable_size_threshold = small_variable_size_threshold

    def __call__(self, getter: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The variable that `getter` gives, cached. Local."""
        elements = tf.TensorShape(kwargs.get("shape")).num_elements() or 0
        device = self.device_for_small_variables
        if elements >= self.small_variable_size_threshold:
            number = self.sizes.index(min(self.sizes))
            self.sizes[number] += elements
            device = self.devices[number]
        return getter(*args, **{**kwargs, "caching_device": device})


class OverrideToLocalVariableIfNotPsVar:
    """Makes variables local, all but the master copies; with `only_trained`, only those that are trained."""

    def __init__(self, only_trained: bool = False) -> None:
        self.only_trained = only_trained

    def __call__(self, getter: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        """The variable that `getter` gives, in the collection of local or of global variables. Local."""
        untrained = self.only_trained and kwargs.get("trainable") is False
        if name.startswith(SHADOW_PREFIX) or untrained:
            return getter(name, *args, **kwargs)
        wanted = list(kwargs.get("collections") or [v1.GraphKeys.GLOBAL_VARIABLES])
        others = [key for key in wanted if key != v1.GraphKeys.GLOBAL_VARIABLES]
        return getter(name, *args, **{**kwargs, "collections": [*others, v1.GraphKeys.LOCAL_VARIABLES]})


class StagedModelVariable:
    """A variable that is read from a staging area, and whose updates wait in one until the next step.

    For what a model updates by itself, such as moving averages; the puts are added to `variable_mgr.staging_delta_ops`.
    """

    def __init__(
        self, real_var: Any, var_stage_get: tf.Tensor, variable_mgr: Any, staged: tf.Tensor | None = None
    ) -> None:
        self.real_var = real_var
        self.var_stage_get = var_stage_get
        self.variable_mgr = variable_mgr
        # What this step stages is read before it updates the variable, or the lateness would be a matter of luck.
        self._before = [] if staged is None else [staged.op]

    @property
    def name(self) -> str:
        """The name of the variable behind. Local."""
        return self.real_var.name

    @property
    def op(self) -> tf.Operation:
        """The operation of the variable behind. Local."""
        return self.real_var.op

    @property
    def device(self) -> str:
        """Where the variable behind is. Local."""
        return self.real_var.device

    @property
    def dtype(self) -> tf.DType:
        """The dtype of a value. Local."""
        return self.var_stage_get.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The static shape. Local."""
        return self.var_stage_get.shape

    def get_shape(self) -> tf.TensorShape:
        """The static shape. Local."""
        return self.shape

    def value(self) -> tf.Tensor:
        """The staged value. Local."""
        return self.var_stage_get

    def read_value(self) -> tf.Tensor:
        """The staged value, as a tensor of its own. Local."""
        return tf.identity(self.var_stage_get, name="read")

    def assign(self, value: Any, name: str | None = None, read_value: bool = True) -> Any:
        """Let the variable have this value at the next step. Local."""
        with tf.control_dependencies(self._before):
            return self.real_var.assign(self._staged(value), name=name, read_value=read_value)

    def assign_add(self, delta: Any, name: str | None = None, read_value: bool = True) -> Any:
        """Add this to the variable at the next step. Local."""
        with tf.control_dependencies(self._before):
            return self.real_var.assign_add(self._staged(delta), name=name, read_value=read_value)

    def assign_sub(self, delta: Any, name: str | None = None, read_value: bool = True) -> Any:
        """Subtract this from the variable at the next step. Local."""
        with tf.control_dependencies(self._before):
            return self.real_var.assign_sub(self._staged(delta), name=name, read_value=read_value)

    def _staged(self, value: Any) -> tf.Tensor:
        with v1.colocate_with(None, True), tf.device(self.var_stage_get.device):
            value = tf.convert_to_tensor(value, self.dtype)
            put, get, _ = stage([value], [self.shape])
        self.variable_mgr.staging_delta_ops.append(put)
        return get[0]


def _staged_as_tensor(staged: StagedModelVariable, dtype: Any = None, name: Any = None, as_ref: bool = False) -> Any:
    if as_ref:
        return getattr(staged.real_var, "handle", staged.real_var.op.outputs[0])
    return staged.value()


tf.register_tensor_conversion_function(StagedModelVariable, _staged_as_tensor)


def _of_value(name: str) -> Callable[..., Any]:
    def operator(staged: StagedModelVariable, *others: Any) -> Any:
        return getattr(staged.value(), name)(*others)

    return operator


for _name in tf.Tensor.OVERLOADABLE_OPERATORS - {"__eq__", "__ne__"}:
    setattr(StagedModelVariable, _name, _of_value(_name))


def stage(
    tensors: Sequence[tf.Tensor], shapes: Sequence[Any], first: Sequence[tf.Tensor] | None = None
) -> tuple[tf.Operation, list[tf.Tensor], tf.Operation | None]:
    """A put of these tensors into a staging area of their own, and what was put there the step before.

    `shapes` are those of the values, which may vary in unknown dimensions. With `first` also an operation that puts
    these there, unless something waits already. Local, in a graph.
    """
    area = {"shared_name": v1.get_default_graph().unique_name("hvdvars_stage")}
    dtypes = [one.dtype for one in tensors]
    put = tf.raw_ops.Stage(values=list(tensors), **area)
    with v1.colocate_with(put):
        got = tf.raw_ops.Unstage(dtypes=dtypes, **area)
        size = tf.raw_ops.StageSize(dtypes=dtypes, **area)
    for value, shape in zip(got, shapes, strict=True):
        value.set_shape(shape)
    if first is None:
        return put, got, None
    known = list(first)

    def fill() -> tf.Operation:
        with v1.colocate_with(put, ignore_existing=True):
            return tf.raw_ops.Stage(values=known, **area)

    return put, got, v1.cond(size > 0, tf.no_op, fill)


class StagedVariableGetter:
    """Makes variables that one tower reads through staging areas, and keeps their puts and gets on the manager.

    `variable_mgr.staging_vars_on_devices[device_num][name]` is the pair of both. With a `cpu_device` the value is
    fetched to it once for all towers. Trained variables come as the value, others as `StagedModelVariable`.
    """

    def __init__(self, device_num: int, devices: Sequence[str], cpu_device: str | None, variable_mgr: Any) -> None:
        self.device_num = device_num
        self.devices = devices
        self.cpu_device = cpu_device
        self.variable_mgr = variable_mgr

    def __call__(self, getter: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        """The staged value of the variable that `getter` gives, or its wrapper. Local."""
        known = self.variable_mgr.staging_vars_on_devices[self.device_num]
        real = getter(name, *args, **kwargs)
        if name not in known:
            value = self._fetched(name, real)
            with tf.device(self.devices[self.device_num]):
                put, got, _ = stage([value], [real.shape])
            known[name] = (put, got[0])
        put, get = known[name]
        if kwargs.get("trainable", True):
            return get
        return StagedModelVariable(real, get, self.variable_mgr, put.inputs[0])

    def _fetched(self, name: str, real: Any) -> tf.Tensor:
        if self.cpu_device is None:
            return _copied(real)
        fetched = self.variable_mgr.staged_vars_on_cpu
        if name not in fetched:
            with tf.device(self.cpu_device):
                fetched[name] = _copied(real)
        return fetched[name]

    def trainable_variables_on_device(self, rel_device_num: int, abs_device_num: int, writable: bool) -> list[Any]:
        """What the tower trains: the variables themselves if `writable`, else their staged values. Local."""
        del abs_device_num
        variables = v1.trainable_variables()
        if writable:
            return variables
        known = self.variable_mgr.staging_vars_on_devices[rel_device_num]
        return [known[variable.name.partition(":")[0]][1] for variable in variables]


def _copied(variable: Any) -> tf.Tensor:
    value = variable.read_value()
    # A ref variable is updated in place, under the eyes of whoever holds its value.
    return value if hasattr(variable, "handle") else tf.raw_ops.DeepCopy(x=value)
