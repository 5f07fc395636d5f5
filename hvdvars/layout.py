"""Which ranks share a node, and which have the same place on the others. Pure, and equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The ranks of each node, ascending; nodes in the order of their first ranks."""

    nodes: tuple[tuple[int, ...], ...]

    @property
    def even(self) -> bool:
        """Whether all nodes have equally many ranks."""
        return len({len(node) for node in self.nodes}) <= 1

    @property
    def across(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that have one place on all nodes, ascending, for each place; empty where nodes differ in size."""
        return tuple(tuple(sorted(ranks)) for ranks in zip(*self.nodes, strict=True)) if self.even else ()


def arrange(hosts: Sequence[str]) -> Layout:
    """The layout of ranks on these hosts: one name per rank, in rank order. Local."""
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return Layout(tuple(tuple(ranks) for ranks in nodes.values()))
