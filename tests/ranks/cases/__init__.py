"""What runs on every rank: functions marked `@case`, in the order of `MODULES` and of their definition.

A case is called as `function(world)` or, once for each of its `params`, as `function(world, param)`. It fails by
raising, on any rank. Every rank runs the same cases in the same order.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MODULES = (
    "lifecycle",
    "moves",
    "values",
    "reduction",
    "graphs",
    "mismatch",
    "contract",
    "relaxed",
    "staged",
    "masters",
    "loss_scale",
    "tower_graphs",
    "tower_saves",
    "tower_steps",
    "tower_limits",
    "kinds",
    "reports",
    "algorithms",
    "checkpoints",
    "restart",
)


@dataclass(frozen=True)
class Case:
    """One function with one of its params, and the launches that it belongs to."""

    name: str
    function: Callable[..., None]
    arguments: tuple[Any, ...]
    sizes: tuple[int, ...]
    hows: tuple[str, ...]
    gloo: tuple[int, ...]
    before_init: bool
    limit: int

    def belongs_to(self, how: str, size: int) -> bool:
        return how in self.hows and size in self.sizes and (how != "gloo" or size in self.gloo)


@dataclass
class World:
    """What a case is told: its place among the ranks, the launch, and the package's collectives (after `init`)."""

    rank: int = -1
    size: int = -1
    how: str = ""
    collectives: Any = None
    meeting: Any = None
    notes: dict[str, Any] = field(default_factory=dict)
    """What one case leaves for later ones."""

    @property
    def ranks(self) -> range:
        return range(self.size)


ALL: list[Case] = []
LAYOUTS = ("2+2", "3+2", "1+1+1+1")
"""Launches with Gloo on this machine whose ranks believe to be on several nodes, of so many ranks each."""
EVERYWHERE = ("mpi", "gloo", "horovodrun", "bare")


def case(
    *,
    sizes: Sequence[int] = (1, 2, 3, 4),
    hows: Sequence[str] = ("mpi", "gloo"),
    params: Mapping[str, Any] | Sequence[str] | None = None,
    gloo: Sequence[int] | None = None,
    before_init: bool = False,
    limit: int = 90,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function that runs on every rank of the launches named; `limit` is in seconds.

    `gloo` are the sizes among `sizes` that run with Gloo too: all, or 2 where there are `params`.
    """
    with_gloo = gloo if gloo is not None else ((2,) if params else sizes)

    def register(function: Callable[..., None]) -> Callable[..., None]:
        base = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        table = params if isinstance(params, Mapping) else {name: name for name in params or ()}
        runs = [(f"{base}[{name}]", (value,)) for name, value in table.items()] if params else [(base, ())]
        for name, arguments in runs:
            ALL.append(Case(name, function, arguments, tuple(sizes), tuple(hows), tuple(with_gloo), before_init, limit))
        return function

    return register


def widely(
    every: Mapping[str, Any] | Sequence[str],
    few: Mapping[str, Any] | Sequence[str],
    sizes: Sequence[int] = (1, 2, 3, 4),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function with `every` param on 2 ranks with MPI, with a `few` on the other sizes and with Gloo."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        case(params=every, sizes=[size for size in sizes if size == 2], hows=("mpi",))(function)
        case(params=few, sizes=[size for size in sizes if size != 2], hows=("mpi",))(function)
        return case(params=few, sizes=[size for size in sizes if size == 2], hows=("gloo",))(function)

    return register


def load() -> list[Case]:
    """All cases, in the order in which every rank runs them."""
    if not ALL:
        for name in MODULES:
            importlib.import_module(f"{__name__}.{name}")
    return ALL
