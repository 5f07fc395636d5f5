"""Small helpers of the cases."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


def raised(kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any]) -> str:
    """The message of the error that `call` raises; fails unless there is one of this kind."""
    try:
        result = call()
    except kind as error:
        return str(error)
    raise AssertionError(f"expected {kind}, but nothing was raised; the result is {result!r}")


def same_everywhere(world: Any, value: Any, what: str = "value") -> None:
    """Fail unless a JSON-able value is equal on all ranks."""
    ranks = world.meeting.gather_objects(value, "tests.same")
    assert all(other == ranks[0] for other in ranks), f"{what} differs between ranks: {ranks}"


def array(value: Any) -> np.ndarray:
    """A tensor, variable or number as an array; numpy cannot do it alone for scalars of bfloat16."""
    return np.array(value.numpy() if tf.is_tensor(value) else tf.convert_to_tensor(value).numpy())


def data(tensor: Any) -> bytes:
    """The bytes of a tensor or variable."""
    return np.ascontiguousarray(array(tensor)).tobytes()


def digest(*tensors: Any) -> str:
    """One digest of the bytes of all these tensors or variables."""
    return hashlib.blake2b(b"".join(map(data, tensors)), digest_size=16).hexdigest()


def close(actual: Any, wanted: Any, what: str = "", tolerance: float = 1e-6) -> None:
    """Fail unless shapes are equal and values are within `tolerance`, relative and absolute."""
    actual, wanted = (np.asarray(v) if isinstance(v, (list, np.ndarray)) else array(v) for v in (actual, wanted))
    assert actual.shape == wanted.shape, f"{what}: shape {actual.shape}, expected {wanted.shape}"
    wide = np.complex128 if np.iscomplexobj(wanted) else np.float64
    np.testing.assert_allclose(actual.astype(wide), wanted.astype(wide), tolerance, tolerance, err_msg=what)


def sum_of_ranks(size: int) -> int:
    """1 + 2 + … + size: what rank + 1 sums to."""
    return size * (size + 1) // 2


def horovod_operations(function: Any) -> list[str]:
    """The types of Horovod's operations in a concrete function, those of its branches and loop bodies included."""
    graph = function.graph
    found = [op.type for op in graph.get_operations() if op.type.startswith("Horovod")]
    for definition in graph.as_graph_def().library.function:
        found += [node.op for node in definition.node_def if node.op.startswith("Horovod")]
    return found
