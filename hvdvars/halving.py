"""Recursive halving-doubling: who sends which elements to whom, step by step. Pure, and equal on every rank.

In each halving step a member gives half of what it still sums up to a partner and takes the partner's share of the
other half, so that in the end each holds one part of the sum; the doubling steps hand these parts back the same way.
Members beyond the largest power of two fold: they give all they have to a partner first, and get the sum at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

Span = tuple[int, int]
"""From the first element to the one after the last."""


@dataclass(frozen=True)
class Step:
    """One exchange of one member; `partner` is None where it only waits.

    It sends the elements `sent` and receives the elements `received`. Where `adds`, they are added to its own and are
    all that it keeps; otherwise they are new and lie beside what it has. `kept` is what it has afterwards.
    """

    partner: int | None
    sent: Span
    received: Span
    adds: bool
    kept: Span


def schedule(member: int, members: int, length: int) -> tuple[Step, ...]:
    """The steps by which `member` of `members` takes part in summing up buffers of `length` elements.

    All members have equally many steps, and those of one number belong together. Local.

    Raises:
        ValueError: there is no such member, or the length is negative.
    """
    if not 0 <= member < members or length < 0:
        raise ValueError(
            f"halving.schedule: expected a member from 0 to {members - 1} and a length of at least 0; "
            f"got member {member} of {members} and length {length}"
        )
    power = 1 << (members.bit_length() - 1)
    folded = members - power
    whole, nothing = (0, length), (0, 0)
    distances = [power >> shift for shift in range(1, power.bit_length())]
    if member >= power:
        idle = [Step(None, nothing, nothing, False, nothing)] * (2 * len(distances))
        give = Step(member - power, whole, nothing, True, nothing)
        return (give, *idle, Step(member - power, nothing, whole, False, whole))
    before, after = [], []
    if folded:
        takes = member < folded
        partner = member + power if takes else None
        before = [Step(partner, nothing, whole, True, whole) if takes else Step(None, nothing, nothing, False, whole)]
        after = [Step(partner, whole if takes else nothing, nothing, False, whole)]
    return (*before, *_halve_and_double(member, distances, length), *after)


def _halve_and_double(member: int, distances: list[int], length: int) -> list[Step]:
    down, up = [], []
    held = (0, length)
    for distance in distances:
        start, stop = held
        middle = start + (stop - start + 1) // 2
        lower, upper = (start, middle), (middle, stop)
        mine, other = (upper, lower) if member & distance else (lower, upper)
        down.append(Step(member ^ distance, other, mine, True, mine))
        up.append(Step(member ^ distance, mine, other, False, held))
        held = mine
    return [*down, *reversed(up)]
