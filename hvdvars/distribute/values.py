"""Values that each local device has its own of: unsynchronised ones, and ones that are mirrored."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from hvdvars.distribute import context, devices


class DistributedValues:
    """A map from this rank's devices to values. The same on other ranks is reached by collectives."""

    def __init__(self, index: Mapping[str, Any]) -> None:
        """`index` maps devices, in any spelling, to values; the first is the primary one.

        Raises ValueError where it is empty or two keys are one device.
        """
        self._index = {devices.canonicalize(device): value for device, value in index.items()}
        if not self._index or len(self._index) != len(index):
            raise ValueError(f"{type(self).__name__}: expected at least one device, and each once, got {list(index)}")

    def get(self, device: str | None = None) -> Any:
        """The value of `device`; by default of the current replica, else of the update, else across replicas.

        Local. Raises ValueError where there is none, naming the device, those that have one and the current one.
        """
        if device is None:
            replica = context.get_replica_context()
            device = context.get_update_device() if replica is None else replica.device
            if device is None:
                return self._get_cross_replica()
        wanted = devices.canonicalize(device)
        if wanted not in self._index:
            raise self._missing(wanted)
        return self._index[wanted]

    def on_device(self, device: str) -> bool:
        """Whether `device` has a value. Local."""
        return devices.canonicalize(device) in self._index

    @property
    def devices(self) -> list[str]:
        """The canonical devices that have a value, the primary one first. Local."""
        return list(self._index)

    @property
    def parts(self) -> list[Any]:
        """The values in the order of `devices`. Local."""
        return list(self._index.values())

    @property
    def is_tensor_like(self) -> bool:
        """Whether each value is a tensor or can stand for one (a variable, say). Local."""
        return all(tf.is_tensor(value) or isinstance(value, tf.Variable) for value in self._index.values())

    def _get_cross_replica(self) -> Any:
        here = devices.current()
        if here not in self._index:
            raise self._missing(here)
        return self._index[here]

    def _missing(self, device: str) -> ValueError:
        return ValueError(
            f"{type(self).__name__}.get: no value for device {device}; those with one are {self.devices} (the current "
            f"device is {devices.current()}). Ask for one of them, or be in strategy.run or strategy.update."
        )

    def __str__(self) -> str:
        return f"{type(self).__name__}:{self._index}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._index!r})"


class PerDevice(DistributedValues):
    """A map from devices to values that are not synchronised, so that there is none across replicas."""

    def _get_cross_replica(self) -> Any:
        raise ValueError(
            f"{type(self).__name__}.get: values of replicas have no common value. Use strategy.reduce for one, "
            f"get(device) for that of one of {self.devices}, or be in strategy.run."
        )


PerReplica = PerDevice


class DistributedDelegate(DistributedValues):
    """A map from devices to values that acts as its value: attributes, operators and conversions."""

    def __getattr__(self, name: str) -> Any:
        # Copying and unpickling ask before there is an index.
        if name.startswith("__") or "_index" not in self.__dict__:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}")
        return getattr(self.get(), name)

    def __hash__(self) -> int:
        return id(self)

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        return pow(self.get(), other) if modulo is None else pow(self.get(), other, modulo)

    def __round__(self, *digits: Any) -> Any:
        return round(self.get(), *digits)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        array = self.get().__array__()
        return array if dtype is None else array.astype(dtype)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.get(), dtype, name=name)


class Mirrored(DistributedDelegate):
    """A map from devices to values that are kept equal."""

    def _get_cross_replica(self) -> Any:
        here = devices.current()
        return self._index[here] if here in self._index else next(iter(self._index.values()))

    def _as_graph_element(self) -> Any:
        value = self.get()
        convert = getattr(value, "_as_graph_element", None)
        return convert() if callable(convert) else value


_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "invert": operator.invert,
    "abs": abs,
    "len": len,
    "iter": iter,
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "index": operator.index,
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "getitem": operator.getitem,
    "contains": operator.contains,
}
_REFLECTED: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "divmod": divmod,
    "pow": pow,
    "matmul": operator.matmul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
}


def _delegate_operators() -> None:
    """Give `DistributedDelegate` Python's operators, which are looked up on the class and never by `__getattr__`."""

    def unary(apply: Callable[[Any], Any]) -> Any:
        return lambda self: apply(self.get())

    def binary(apply: Callable[[Any, Any], Any]) -> Any:
        return lambda self, other: apply(self.get(), _value(other))

    def reflected(apply: Callable[[Any, Any], Any]) -> Any:
        return lambda self, other: apply(_value(other), self.get())

    for name, one in _UNARY.items():
        setattr(DistributedDelegate, f"__{name}__", unary(one))
    for name, two in (_BINARY | _REFLECTED).items():
        if name != "pow":
            setattr(DistributedDelegate, f"__{name}__", binary(two))
    for name, two in _REFLECTED.items():
        setattr(DistributedDelegate, f"__r{name}__", reflected(two))


def _value(other: Any) -> Any:
    return other.get() if isinstance(other, DistributedDelegate) else other


_delegate_operators()
