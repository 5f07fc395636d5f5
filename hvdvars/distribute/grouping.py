"""From one nest for each device to one nest of distributed values, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from hvdvars.distribute import devices
from hvdvars.distribute.values import DistributedValues, Mirrored, PerDevice


def regroup(per_device: Mapping[str, Any], wrap_class: Callable[[Mapping[str, Any]], Any] = PerDevice) -> Any:
    """One nest of distributed values from a nest for each device, all of one structure.

    `per_device` maps devices to nests of lists, tuples, named tuples and dicts. Of each leaf: one object on all devices
    comes back as it is, the parts of one distributed variable as that variable, and anything else as
    `wrap_class({device: leaf})`. Local.

    Raises:
        ValueError: no device, structures that differ, or parts of a distributed variable on wrong devices; with the
            path of the difference.
    """
    if not per_device:
        raise ValueError("regroup: expected a nest for each of at least one device, got none")
    return _regroup({devices.canonicalize(key): value for key, value in per_device.items()}, wrap_class, "")


def select_device(device: str, structured: Any) -> Any:
    """The nest with each distributed value replaced by the value of `device`. Local.

    Raises ValueError where one has none for it.
    """
    return map_leaves(lambda leaf: leaf.get(device) if isinstance(leaf, DistributedValues) else leaf, structured)


def select_device_mirrored(device: str, structured: Any) -> Any:
    """The same for mirrored and plain values only. Local.

    Raises TypeError for a distributed value that is not mirrored, ValueError where one has none for the device.
    """

    def select(leaf: Any) -> Any:
        if not isinstance(leaf, DistributedValues):
            return leaf
        if not isinstance(leaf, Mirrored):
            raise TypeError(
                f"select_device_mirrored: expected values that are mirrored across replicas, got {leaf} in {structured}"
            )
        return leaf.get(device)

    return map_leaves(select, structured)


def update_regroup(strategy: Any, updates: Mapping[str, Any], should_group: bool = True) -> Any:
    """What an update made on each device, as a nest of mirrored values: to run one is to run the updates of all.

    With `should_group=False` each leaf is the list of its values instead, in the order of the devices. Local.
    Raises ValueError as in `regroup`.
    """
    regrouped = regroup(updates, Mirrored)
    if not should_group:
        return map_leaves(strategy.unwrap, regrouped)

    def group(leaf: Any) -> Any:
        if not isinstance(leaf, DistributedValues):
            return leaf
        done = strategy.group(leaf)
        if not leaf.is_tensor_like:
            return done
        # To run one of them is to run the updates of all devices.
        index = {}
        for device in leaf.devices:
            with tf.device(device), tf.control_dependencies([] if done is None else [done]):
                index[device] = tf.identity(leaf.get(device))
        return Mirrored(index)

    return map_leaves(group, regrouped)


def value_container(value: Any) -> Any:
    """The distributed variable that `value` is a part of; `value` itself if it is none, or the container is gone.

    Local.
    """
    found = _container_of(value)
    return value if found is None else found


def _container_of(value: Any) -> Any:
    if isinstance(value, DistributedValues):
        return None
    reference = getattr(value, "_distributed_container", None)
    return reference() if callable(reference) else None


def _regroup(per_device: dict[str, Any], wrap: Callable[[Mapping[str, Any]], Any], path: str) -> Any:
    first = next(iter(per_device.values()))
    if isinstance(first, (list, tuple)):
        _check_alike(per_device, path, "length", len)
        parts = [
            _regroup({device: nest[i] for device, nest in per_device.items()}, wrap, f"{path}[{i}]")
            for i in range(len(first))
        ]
        return _sequence_like(first, parts)
    if isinstance(first, dict):
        _check_alike(per_device, path, "keys", lambda nest: sorted(nest, key=str))
        return {
            key: _regroup({device: nest[key] for device, nest in per_device.items()}, wrap, f"{path}[{key!r}]")
            for key in first
        }
    return _regroup_leaf(per_device, wrap, path)


def _check_alike(per_device: dict[str, Any], path: str, what: str, measure: Callable[[Any], Any]) -> None:
    device, first = next(iter(per_device.items()))
    for other_device, other in per_device.items():
        if _kind(other) is not _kind(first):
            difference = f"a {type(first).__name__} on {device} and a {type(other).__name__} on {other_device}"
        elif measure(other) != measure(first):
            difference = f"{what} {measure(first)} on {device} and {what} {measure(other)} on {other_device}"
        else:
            continue
        raise ValueError(
            f"regroup: values{path} differ in structure: {difference}. Every device must have the same structure."
        )


def _kind(nest: Any) -> type:
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)
    return next((kind for kind in (list, tuple, dict) if isinstance(nest, kind)), type(nest))


def _regroup_leaf(per_device: dict[str, Any], wrap: Callable[[Mapping[str, Any]], Any], path: str) -> Any:
    values = list(per_device.values())
    for device, value in per_device.items():
        if isinstance(value, (list, tuple, dict)):
            first = type(values[0]).__name__
            raise ValueError(
                f"regroup: values{path} differ in structure: a {first} on {next(iter(per_device))} and a "
                f"{type(value).__name__} on {device}. Every device must have the same structure."
            )
    container = _container_of(values[0])
    if container is not None:
        _check_parts(per_device, container, path)
        return container
    if all(value is values[0] for value in values):
        return values[0]
    return wrap(per_device)


def _check_parts(per_device: dict[str, Any], container: Any, path: str) -> None:
    """The parts of one distributed variable must be where it has them."""
    for device, part in per_device.items():
        if _container_of(part) is not container or not container.on_device(device) or container.get(device) is not part:
            raise ValueError(
                f"regroup: values{path} has a part of the variable {container.name} on some devices, and on {device} "
                f"something else: {part}. Give each device its own part of the variable."
            )


def map_leaves(function: Callable[[Any], Any], nest: Any) -> Any:
    """The nest with `function` of each leaf; unlike in `tf.nest`, a distributed value is always a leaf. Local."""
    if isinstance(nest, (list, tuple)):
        parts = [map_leaves(function, part) for part in nest]
        return _sequence_like(nest, parts)
    if isinstance(nest, dict):
        return {key: map_leaves(function, part) for key, part in nest.items()}
    return function(nest)


def _sequence_like(nest: Any, parts: list[Any]) -> Any:
    if hasattr(nest, "_fields"):
        return type(nest)._make(parts)
    return parts if isinstance(nest, list) else tuple(parts)
