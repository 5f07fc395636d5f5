"""Host arrays to rank 0 and from it, and outcomes that all ranks share: what one rank does for all of them.

Arrays of any size and dtype travel as bytes in chunks, so that no count outgrows the transport's 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from hvdvars import collectives, meeting
from hvdvars.session import world

T = TypeVar("T")

CHUNK_BYTES = 64 * 1024 * 1024
"""Bytes per collective, all ranks together."""

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ValueError, TypeError, OSError, FileNotFoundError, PermissionError, IsADirectoryError)
}


def together(function: str, work: Callable[[], T]) -> T:
    """Do this rank's work and give its result, unless it failed on any rank: then the same error on every rank.

    Collective: every rank of the group calls it in the same order, outside of graphs. `work` is local.

    Raises:
        Exception: the error of the first rank that failed, by its kind and message, naming `function` and the rank.
    """
    result, failure = _attempt(work)
    _raise_first(function, meeting.gather_objects(_told(failure), "relay"), failure)
    return result  # type: ignore[return-value]


def from_root(function: str, work: Callable[[], T]) -> T:
    """Do work on rank 0 and give its JSON-able result, or its error, on every rank.

    Collective: every rank of the group calls it in the same order, outside of graphs.

    Raises:
        Exception: the error on rank 0, by its kind and message, naming `function`.
    """
    result, failure = _attempt(work) if world().rank == 0 else (None, None)
    answers = meeting.gather_objects([_told(failure), result], "relay")
    _raise_first(function, [answers[0][0]], failure)
    return answers[0][1]


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as failure:  # whatever it is, the others wait to hear of it
        return None, failure


def _told(failure: Exception | None) -> list[str] | None:
    if failure is None:
        return None
    kinds = [kind.__name__ for kind in type(failure).__mro__ if kind.__name__ in _KINDS]
    return [kinds[0], str(failure)] if kinds else ["RuntimeError", f"{type(failure).__name__}: {failure}"]


def _raise_first(function: str, told: Sequence[list[str] | None], own: Exception | None) -> None:
    for rank, failure in enumerate(told):
        if failure is not None:
            kind, message = failure
            where = f" (on rank {rank})" if rank else ""
            message = message if message.startswith(function) else f"{function}: {message}"
            raise _KINDS.get(kind, RuntimeError)(message + where) from own


def collect(arrays: Sequence[np.ndarray], name: str) -> list[list[np.ndarray]]:
    """Every rank's arrays, in rank order, on rank 0; nothing on the other ranks.

    Collective: every rank of the group calls it in the same order, outside of graphs, with any arrays of its own.
    """
    described = [[_dtype_name(array), list(array.shape)] for array in arrays]
    ranks = meeting.gather_objects(described, name)
    # Rank 0 has its own already.
    sizes = [0] + [sum(_bytes(*array) for array in rank) for rank in ranks[1:]]
    mine = _joined(arrays) if world().rank else np.empty(0, np.uint8)
    step = max(1, CHUNK_BYTES // len(ranks))
    received = [np.empty(size, np.uint8) for size in (sizes if world().rank == 0 else [])]
    for start in range(0, max(sizes), step):
        counts = [min(step, max(0, size - start)) for size in sizes]
        own = counts[world().rank]
        splits = [own] + [0] * (len(ranks) - 1)
        data = collectives.all_to_all(tf.constant(mine[start : start + own]), splits, f"hvdvars.{name}.bytes").numpy()
        end = 0
        for buffer, count in zip(received, counts, strict=False):
            buffer[start : start + count] = data[end : end + count]
            end += count
    if world().rank:
        return []
    return [list(arrays)] + [_split(received[rank], ranks[rank]) for rank in range(1, len(ranks))]


def deliver(arrays: Mapping[str, np.ndarray], layout: Sequence[Sequence[Any]], name: str) -> Iterator[Any]:
    """Pairs of key and array, on every rank, of the arrays that rank 0 has; `layout` is their `layout_of`.

    One array (or several that make a chunk) is in memory at a time. The other ranks' `arrays` are ignored.
    Collective: every rank of the group goes through all of it, in the same order, outside of graphs.
    """
    group: list[Sequence[Any]] = []
    filled = 0
    for number, (key, dtype, shape) in enumerate(layout):
        group.append((key, dtype, shape))
        filled += _bytes(dtype, shape)
        if number + 1 == len(layout) or filled + _bytes(*layout[number + 1][1:]) > CHUNK_BYTES:
            mine = _joined([arrays[key] for key, _, _ in group]) if world().rank == 0 else np.empty(filled, np.uint8)
            _broadcast_bytes(mine, name)
            yield from zip([key for key, _, _ in group], _split(mine, [item[1:] for item in group]), strict=True)
            group, filled = [], 0


def layout_of(arrays: Mapping[str, np.ndarray]) -> list[list[Any]]:
    """Key, dtype and shape of each array, JSON-able. Local."""
    return [[key, _dtype_name(array), list(array.shape)] for key, array in arrays.items()]


def _broadcast_bytes(buffer: np.ndarray, name: str) -> None:
    if world().size == 1:
        return
    for start in range(0, len(buffer), CHUNK_BYTES):
        chunk = collectives.broadcast(tf.constant(buffer[start : start + CHUNK_BYTES]), 0, f"hvdvars.{name}.bytes")
        if world().rank:
            buffer[start : start + CHUNK_BYTES] = chunk.numpy()


def _dtype_name(array: np.ndarray) -> str:
    return tf.as_dtype(array.dtype).name


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * tf.as_dtype(dtype).size


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    if not arrays:
        return np.empty(0, np.uint8)
    return np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])


def _split(data: np.ndarray, described: Sequence[Sequence[Any]]) -> list[np.ndarray]:
    arrays, end = [], 0
    for dtype, shape in described:
        start, end = end, end + _bytes(dtype, shape)
        # Copied, because numpy does not like values that begin at odd addresses.
        arrays.append(data[start:end].copy().view(tf.as_dtype(dtype).as_numpy_dtype).reshape(shape))
    return arrays
