"""What all ranks do at one place, outside of graphs: wait for each other, be in one call, show each other values."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import tensorflow as tf

from hvdvars.collectives import all_gather
from hvdvars.graphs import evaluate
from hvdvars.session import require_started, world


def barrier() -> None:
    """Wait until every rank is here. Collective: every rank of the group calls it in the same order."""
    require_started("barrier")
    take_turn("barrier")


def take_turn(call: str, shown: str = "") -> None:
    """Meet all ranks, and go on only if all of them are in the same `call`, a text that says which and with what.

    An eager call blocks until all ranks take part: two ranks in different ones would wait for each other for ever.
    `shown` takes the place of `call` in messages. Collective: every rank of the group calls it in the same order,
    outside of graphs or while one is traced.

    Raises:
        RuntimeError: on every rank alike, naming the calls and the ranks.
    """
    if world().size == 1:
        return
    code = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest(), "little", signed=True)
    codes = _gather(np.array([code], np.int64), "hvdvars.turn")
    if (codes == code).all():
        return
    calls = gather_objects(shown or call, "calls")
    listed = "\n  ".join(f"rank {rank}: {other}" for rank, other in enumerate(calls[:8]))
    raise RuntimeError(
        f"The ranks are in different calls, so nothing was sent.\n  {listed}\nEvery rank must make the same calls in "
        "the same order; inside one tf.function the order is free."
    )


def gather_objects(value: Any, name: str) -> list[Any]:
    """The JSON-able `value` of each rank, in rank order.

    Collective: every rank of the group calls it in the same order, outside of graphs. JSON rather than pickle, so that
    what arrives is data and never code.
    """
    require_started("gather_objects")
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = _gather(np.array([len(data)], np.int64), f"hvdvars.{name}.sizes")
    joined = _gather(data, f"hvdvars.{name}.data").tobytes()
    ends = np.cumsum(sizes)
    return [json.loads(joined[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def _gather(values: np.ndarray, name: str) -> np.ndarray:
    return evaluate(lambda: all_gather(tf.constant(values), name))
