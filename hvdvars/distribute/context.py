"""Where the caller is: in a replica of a strategy, across its replicas, or in an update of one device.

A *replica* context is inside `strategy.run`, once for each local tower. A *cross-replica* context is everywhere else;
inside `strategy.update` it has the device that is being updated. Each thread has contexts of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_local = threading.local()


@dataclass(frozen=True)
class Place:
    """One entry of the stack of contexts; without `replica` it is a cross-replica one."""

    strategy: Any
    replica: ReplicaContext | None = None
    update_device: str | None = None


class ReplicaContext:
    """What a function in `strategy.run` is told about its replica.

    `replica_id_in_sync_group` counts the replicas of all ranks, `local_index` those of this rank; `device` is the
    replica's, canonical.
    """

    def __init__(self, strategy: Any, local_index: int, device: str, park: Callable[..., Any]) -> None:
        self.strategy = strategy
        self.local_index = local_index
        self.device = device
        self._park = park

    @property
    def replica_id_in_sync_group(self) -> int:
        """The replica's number among those of all ranks: rank by rank."""
        return self.strategy.first_replica + self.local_index

    tower_id = replica_id_in_sync_group

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas all ranks have together."""
        return self.strategy.num_replicas_in_sync

    num_towers = num_replicas_in_sync

    @property
    def distribution_strategy(self) -> Any:
        """The strategy, by the older name."""
        return self.strategy

    @property
    def devices(self) -> list[str]:
        """The replica's devices: one."""
        return [self.device]

    def merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Wait for all local replicas, call `merge_fn(strategy, *args, **kwargs)` once, and give this replica its part.

        `merge_fn` runs in the cross-replica context, with each argument regrouped over the local replicas: `PerReplica`
        where they differ, or the value itself where they all give one object. What it returns is specialised for this
        replica's device. Collective if `merge_fn` is; every local replica calls it in the same order.

        Raises:
            RuntimeError: called in a `merge_call`, or the local replicas do not all call it.
        """
        if get_replica_context() is None:
            raise RuntimeError("merge_call: already in the cross-replica context; call it inside strategy.run only")
        return self._park(self, merge_fn, tuple(args), dict(kwargs or {}))

    def all_reduce(self, aggregation: Any, value: Any) -> Any:
        """`value` reduced over all replicas of all ranks, as `strategy.reduce` does. `value` may be a nest.

        Collective: every replica of every rank calls it in the same order.
        """

        def reduce(strategy: Any, value: Any) -> Any:
            return strategy.reduce(aggregation, value)

        return self.merge_call(reduce, (value,))


class TowerContext(ReplicaContext):
    """The same with the older call: `merge_call(merge_fn, *args, **kwargs)`."""

    def merge_call(self, merge_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Like `ReplicaContext.merge_call`, with the arguments themselves."""
        return super().merge_call(merge_fn, args, kwargs)


def get_replica_context() -> ReplicaContext | None:
    """The replica that the caller is in, or None in the cross-replica context. Local."""
    return _top().replica


def get_tower_context() -> TowerContext | None:
    """The same, with the older call of `merge_call`. Local."""
    replica = get_replica_context()
    if replica is None:
        return None
    return TowerContext(replica.strategy, replica.local_index, replica.device, replica._park)


def in_cross_replica_context() -> bool:
    """Whether the caller is in no replica: outside of all strategies too. Local."""
    return get_replica_context() is None


def get_strategy() -> Any:
    """The strategy whose scope, replica or update the caller is in, or None. Local."""
    return _top().strategy


def get_cross_replica_context() -> Any:
    """The same, but None in a replica. Local."""
    return get_strategy() if in_cross_replica_context() else None


def has_strategy() -> bool:
    """Whether the caller is in a context of a strategy. Local."""
    return get_strategy() is not None


def get_update_device() -> str | None:
    """The device that is being updated, or None outside of updates. Local."""
    return _top().update_device


get_distribution_strategy = get_strategy
has_distribution_strategy = has_strategy
get_cross_tower_context = get_cross_replica_context


@contextlib.contextmanager
def enter(place: Place) -> Iterator[None]:
    """Be in this context. Local."""
    stack = _stack()
    stack.append(place)
    try:
        yield
    finally:
        stack.pop()


def require_replica(function: str) -> ReplicaContext:
    """The replica that the caller is in. Local. Raises RuntimeError in the cross-replica context."""
    replica = get_replica_context()
    if replica is None:
        raise RuntimeError(f"{function} works in a replica: call it in a function that strategy.run runs")
    return replica


def require_cross_replica(function: str) -> None:
    """Refuse to be in a replica. Local. Raises RuntimeError there."""
    if not in_cross_replica_context():
        raise RuntimeError(
            f"{function} works across replicas: call it outside of strategy.run, or in a function given to merge_call"
        )


def _stack() -> list[Place]:
    if not hasattr(_local, "stack"):
        _local.stack = [Place(None)]
    return _local.stack


def _top() -> Place:
    return _stack()[-1]
