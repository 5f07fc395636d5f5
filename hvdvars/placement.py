"""Which rank owns what: whole variables, or even pieces of flat buffers. Pure, and equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence


def place(sizes: Sequence[int], ranks: int, loads: Sequence[int] = ()) -> tuple[int, ...]:
    """The owner of each variable: the largest first, each to the rank with the fewest bytes so far.

    `sizes` are bytes, the result has one rank per entry, in the same order; `loads` are the bytes that each rank owns
    already (none: nothing). Ties go to the earlier variable and the
    lower rank, so that every rank computes the same answer without asking. (Graham's rule: no rank gets more than
    4/3 of the best possible largest load.) Local.

    Raises:
        ValueError: there are no ranks, or a size is negative.
    """
    _check("place", sizes, ranks)
    loads = list(loads) or [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += sizes[index]
    return tuple(owners)


def balance(owners: Sequence[int], sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Bytes that each rank owns, one entry per rank. Local."""
    loads = [0] * ranks
    for owner, size in zip(owners, sizes, strict=True):
        loads[owner] += size
    return tuple(loads)


def split_evenly(length: int, ranks: int) -> tuple[int, ...]:
    """How many of `length` elements each rank owns: counts that differ by at most one, the larger ones first. Local.

    Raises:
        ValueError: there are no ranks, or `length` is negative.
    """
    _check("split_evenly", [length], ranks)
    quotient, rest = divmod(length, ranks)
    return tuple(quotient + (rank < rest) for rank in range(ranks))


def _check(function: str, sizes: Sequence[int], ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"{function}: expected at least one rank, got {ranks}")
    for index, size in enumerate(sizes):
        if size < 0:
            raise ValueError(f"{function}: sizes[{index}] is {size}, expected at least 0")
