"""What tf_cnn_benchmarks' all-reduce module says about specs, devices and sizes, on this package's spec grammar.

No communication and no ops: names and numbers only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hvdvars import spec

# At most 18 digits, as in a spec.
_INTEGER = re.compile(r"(-?[0-9]{1,18})|([0-9]{1,18})([KkMGT])")
_POWERS = {"K": 10, "k": 10, "M": 20, "G": 30, "T": 40}
_GROUP_KEYS: dict[tuple[str, ...], int] = {}


class AllReduceSpecTuple(NamedTuple):
    """`alg` on `shards` pieces, for tensors of at most `limit` elements (-1: the rest)."""

    alg: str
    shards: int
    limit: int


def parse_general_int(s: str) -> int:
    """The integer that a string like `12`, `-1` or `32k` says; K, k, M, G and T are powers of 1024. Local.

    Raises TypeError if `s` is not a string, ValueError that quotes it if it is no such integer.
    """
    if not isinstance(s, str):
        raise TypeError(f"parse_general_int: expected a string such as '32k', got {s!r} ({type(s).__name__})")
    match = _INTEGER.fullmatch(s)
    if match is None:
        raise ValueError(f"parse_general_int: expected digits with an optional K, k, M, G or T after them, got {s!r}")
    return int(match[1]) if match[1] else int(match[2]) << _POWERS[match[3]]


def parse_all_reduce_spec(all_reduce_spec: str) -> list[AllReduceSpecTuple]:
    """Read an `all_reduce_spec` (the grammar of `hvdvars.spec`); the limit of the last range is -1.

    Local. Raises TypeError if it is not a string, ValueError that quotes the spec and the wrong part otherwise.
    """
    return [
        AllReduceSpecTuple(part.alg, part.shards, -1 if part.limit is None else part.limit)
        for part in spec.parse(all_reduce_spec)
    ]


def build_all_reduce_device_prefixes(job_name: str, num_tasks: int) -> list[str]:
    """What device names of each task begin with: `/job:worker/task:0` and so on, or `/job:localhost`. Local.

    Raises ValueError for another number of tasks than one on `localhost`.
    """
    if job_name != "localhost":
        return [f"/job:{job_name}/task:{task}" for task in range(num_tasks)]
    if num_tasks != 1:
        raise ValueError(
            f"build_all_reduce_device_prefixes: job 'localhost' has one task, got num_tasks={num_tasks}; "
            "name the job 'worker' or 'ps' for several"
        )
    return ["/job:localhost"]


def group_device_names(devices: Sequence[str], group_size: int) -> list[list[str]]:
    """Groups of `group_size` names, dealt out in turn; the first names come again until the last group is full.

    Local. Raises ValueError unless `group_size` is from 1 to the number of devices.
    """
    if not 1 <= group_size <= len(devices):
        raise ValueError(f"group_device_names: expected a group_size from 1 to {len(devices)}, got {group_size}")
    groups = -(-len(devices) // group_size)
    dealt = [devices[turn % len(devices)] for turn in range(groups * group_size)]
    return [dealt[group::groups] for group in range(groups)]


def split_grads_by_size(
    threshold_size: int, device_grads: Sequence[Sequence[Any]]
) -> tuple[list[list[list[Any]]], list[list[list[Any]]]]:
    """The `[gradient, variable]` pairs of at most `threshold_size` elements, and the others; a list for each device.

    Devices without any such pair have no list. Local. Raises ValueError for gradients of unknown size, and for None.
    """
    small, large = [], []
    for device, pairs in enumerate(device_grads):
        few: list[list[Any]] = []
        many: list[list[Any]] = []
        for index, (grad, var) in enumerate(pairs):
            elements = None if grad is None else grad.shape.num_elements()
            if elements is None:
                raise ValueError(
                    f"split_grads_by_size: gradient {index} of device {device} has no known size: {grad!r}; "
                    "give its static shape, and leave None out"
                )
            (few if elements <= threshold_size else many).append([grad, var])
        small += [few] if few else []
        large += [many] if many else []
    return small, large


def collective_group_key(devices: Iterable[str]) -> int:
    """A number for this set of devices: the same for the same types and indices, whatever the order, job and task.

    Local. Raises ValueError for a name without device type and index.
    """
    return _GROUP_KEYS.setdefault(tuple(sorted(map(_type_and_index, devices))), len(_GROUP_KEYS) + 1)


def contains_any(haystack: str, needles: Iterable[str]) -> bool:
    """Whether any of the needles is a part of `haystack`. Local."""
    return any(needle in haystack for needle in needles)


def _type_and_index(name: str) -> str:
    device = tf.DeviceSpec.from_string(name)
    if device.device_type is None or device.device_index is None:
        raise ValueError(f"collective_group_key: expected names such as '/task:0/device:GPU:1', got {name!r}")
    return f"{device.device_type}:{device.device_index}"
