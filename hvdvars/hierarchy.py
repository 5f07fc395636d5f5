"""All-reduce in two stages: inside the node, then across nodes, each by the process set of the ranks that take part.

Inside the node the buffer is summed up in pieces, each by one of the node's ranks; ranks with the same place on the
other nodes bring the pieces together; then they are gathered in the node again.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import tensorflow as tf

from hvdvars import algorithms, check, collectives, halving, launchenv, layout, meeting, spec
from hvdvars.session import Group, World, world

UNEVEN = "xring, because nodes have different numbers of ranks"
"""What every two-stage algorithm does instead where ranks have no counterpart on each other node."""


@dataclass(frozen=True)
class Hierarchy:
    """This rank's node, and the ranks with its place on all nodes; None where nodes have different numbers of ranks."""

    node: Group | None
    across: Group | None
    nodes: int


_established: tuple[World, Hierarchy] | None = None


def establish() -> Hierarchy:
    """Find out which ranks share a node, and make the process sets of both stages, once for a world.

    Collective: every rank calls it at the same place, outside of graphs and while nothing else is being sent.
    """
    global _established
    place = world()
    if _established is not None and _established[0] is place:
        return _established[1]
    if place.size > 1:
        meeting.take_turn("create", "create with an all_reduce_spec in two stages")
    hosts = meeting.gather_objects(launchenv.host_name(), "hosts")
    found = layout.arrange(hosts)
    if found.even:
        groups = collectives.make_groups([*found.nodes, *found.across])
        node, across = [group for group in groups if place.rank in group.ranks]
        hierarchy = Hierarchy(node, across, len(found.nodes))
    else:
        hierarchy = Hierarchy(None, None, len(found.nodes))
        if place.rank == 0:
            sizes = ", ".join(str(len(node)) for node in found.nodes[:8])
            warnings.warn(f"hvdvars: all_reduce_spec in two stages runs as {UNEVEN} ({sizes})", stacklevel=3)
    _established = (place, hierarchy)
    return hierarchy


def current() -> Hierarchy:
    """What `establish` made for this world. Local. Raises RuntimeError before."""
    if _established is None or _established[0] is not world():
        raise RuntimeError(
            "hierarchy.current: no process sets were made; call hierarchy.establish() on every rank first."
        )
    return _established[1]


def runs_as(alg: str) -> str:
    """The algorithm that this name stands for in this world: itself, or what takes its place and why. Local."""
    if alg not in spec.HIERARCHICAL:
        return alg
    if current().node is None:
        return UNEVEN
    return alg.partition("/")[0] if current().nodes == 1 else alg


def all_reduce(buffer: tf.Tensor, name: str, scale: float, alg: str, shards: int) -> tf.Tensor:
    """The flat buffer summed over all ranks and multiplied by `scale`, by any algorithm of a spec.

    Collective: every rank of the group calls it in the same order, after `establish` for an algorithm in two stages.
    """
    if alg not in spec.HIERARCHICAL:
        return algorithms.all_reduce(buffer, name, scale, alg, shards)
    inside, _, outside = alg.partition("/")
    place = current()
    if place.node is None or place.across is None:
        return collectives.all_reduce(buffer, name, scale)
    if place.nodes == 1:
        return algorithms.all_reduce(buffer, name, scale, inside, shards)
    node, across = place.node, place.across

    # A spec gives `nccl` no number of shards: every rank of the node, and every node, gets one.
    here, there = (shards, shards) if inside == "pscpu" else (node.size, across.size)

    def meet_other_nodes(part: tf.Tensor) -> tf.Tensor:
        return _across(part, f"{name}.across", outside, there, across) if check.length_of(part) else part

    with algorithms.device_of(inside):
        # Scaled in the first stage, half precision stays within the range of the addends in the second.
        return algorithms.shuffle(buffer, f"{name}.node", scale, here, node, meet_other_nodes)


def _across(part: tf.Tensor, name: str, alg: str, shards: int, group: Group) -> tf.Tensor:
    if alg == "xring":
        return collectives.all_reduce(part, name, group=group)
    if alg == "rechd":
        return halving_doubling(part, name, group)
    with algorithms.device_of(alg):
        return algorithms.shuffle(part, name, 1.0, shards, group)


def halving_doubling(buffer: tf.Tensor, name: str, group: Group) -> tf.Tensor:
    """The flat buffer summed over the group by recursive halving and doubling, the same bits on every rank.

    Each step is an all-to-all in which every rank sends to its partner only.
    Collective: every rank of the group calls it in the same order.
    """
    steps = halving.schedule(group.place, group.size, check.length_of(buffer))
    held, start = buffer, 0
    for number, step in enumerate(steps):
        counts = [0] * group.size
        if step.partner is not None:
            counts[step.partner] = step.sent[1] - step.sent[0]
        sent = held[step.sent[0] - start : step.sent[1] - start] if sum(counts) else held[:0]
        received = collectives.all_to_all(sent, counts, f"{name}.{number}", group)
        received = tf.ensure_shape(received, [step.received[1] - step.received[0]])
        if step.adds:
            own = held[step.kept[0] - start : step.kept[1] - start]
            held, start = own + received, step.kept[0]
        elif check.length_of(received):
            joined = [held, received] if step.received[0] > start or not check.length_of(held) else [received, held]
            held, start = tf.concat(joined, 0), step.kept[0]
    return held


def count(alg: str, shards: int, elements: int) -> int:
    """How many collectives `all_reduce` makes of a buffer of so many elements, on the rank that makes most. Local."""
    if alg not in spec.HIERARCHICAL:
        return algorithms.count(alg, shards, elements)
    inside, _, outside = alg.partition("/")
    place = current()
    if world().size == 1:
        return 0
    if place.node is None:
        return 1
    if place.nodes == 1:
        return algorithms.count(inside, shards, elements)
    # The first rank of a node has the first piece, which is never empty.
    across = {"xring": 1, "pscpu": 2, "rechd": len(halving.schedule(0, place.nodes, 1))}[outside]
    return across + (2 if place.node.size > 1 else 0)
