"""Devices of this process as keys: one canonical string for each."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import device_util


def canonicalize(device: str) -> str:
    """The device with all its parts, such as `/job:localhost/replica:0/task:0/device:CPU:0`.

    Parts that are missing are those of this process; without a type it is the CPU, without a number the first. Local.
    Raises ValueError for what is no device.
    """
    try:
        given = tf.DeviceSpec.from_string(device)
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"expected a device such as 'CPU:0' or '/device:GPU:1', got {device!r}") from error
    here = tf.DeviceSpec(job="localhost", replica=0, task=0, device_type="CPU", device_index=0)
    whole = here.make_merged_spec(given)
    return whole.replace(device_type=whole.device_type.upper()).to_string()


def current() -> str:
    """The device on which an operation made here would be, in its canonical form. Local."""
    return canonicalize(device_util.current() or "")


def list_local(kind: str | None = None) -> list[str]:
    """This process's logical devices of a kind, `CPU` or `GPU`; by default its GPUs, or else its CPUs. Local."""
    kinds = [kind] if kind else ["GPU", "CPU"]
    found: list[Any] = next((devices for one in kinds if (devices := tf.config.list_logical_devices(one))), [])
    return [canonicalize(device.name) for device in found]
