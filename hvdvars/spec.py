"""The grammar of `all_reduce_spec`: which all-reduce algorithm takes tensors of which size.

    spec  ::= range | range ":" limit ":" spec
    range ::= alg | alg "#" k
    limit ::= digits [K | k | M | G | T]        (1024-based, in elements)

A tensor of at most `limit` elements goes to the range before that limit; the last range takes the rest.
Pure Python: neither TensorFlow nor Horovod is needed to refuse a wrong spec.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

SHARDED = ("xring", "pscpu", "psgpu", "collective", "pscpu/pscpu")
"""Algorithms for which `#k` means something."""

HIERARCHICAL = ("nccl/xring", "nccl/rechd", "nccl/pscpu", "pscpu/pscpu")
"""Algorithms in two stages: inside the node, then across nodes."""

ALGORITHMS = ("xring", "nccl", "pscpu", "psgpu", "collective", *HIERARCHICAL)

# At most 18 digits: int() refuses very long ones with a message that does not quote the spec.
_DIGITS = re.compile(r"[0-9]{1,18}")
_LIMIT = re.compile(r"([0-9]{1,18})([KkMGT]?)")
_UNITS = {"": 1, "k": 1 << 10, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Range:
    """`alg` on `shards` pieces, for tensors of at most `limit` elements (`None`: the rest)."""

    alg: str
    shards: int = 1
    limit: int | None = None


def parse(text: str) -> tuple[Range, ...]:
    """Read an `all_reduce_spec`; limits ascend and only the last range has none.

    Local. Raises TypeError if `text` is not a string, ValueError that quotes the spec and the wrong part otherwise.
    """
    if not isinstance(text, str):
        raise TypeError(f"all_reduce_spec: expected a string such as 'xring#2', got {text!r} ({type(text).__name__})")
    if not text:
        raise ValueError(f"all_reduce_spec '': the spec is empty; give one of {', '.join(ALGORITHMS)}")
    parts = text.split(":")
    if len(parts) % 2 == 0:
        _bad(text, parts, len(parts) - 1, "a limit must be followed by ':' and the algorithm for larger tensors")
    ranges: list[Range] = []
    below = 0
    for index in range(0, len(parts), 2):
        alg, shards = _parse_range(text, parts, index)
        limit = None
        if index + 1 < len(parts):
            limit = _parse_limit(text, parts, index + 1, below)
            below = limit
        ranges.append(Range(alg, shards, limit))
    return tuple(ranges)


def unparse(ranges: Sequence[Range]) -> str:
    """Write ranges as a spec that `parse` reads back to the same ranges. Local."""
    parts: list[str] = []
    for part in ranges:
        parts.append(part.alg if part.shards == 1 else f"{part.alg}#{part.shards}")
        if part.limit is not None:
            parts.append(_unparse_limit(part.limit))
    return ":".join(parts)


def select(ranges: Sequence[Range], elements: int) -> int:
    """Index of the range that takes a tensor of `elements` elements. Local."""
    for index, part in enumerate(ranges):
        if part.limit is None or elements <= part.limit:
            return index
    raise ValueError(f"spec.select: no range takes {elements} elements: the last of {list(ranges)} must have no limit")


def _parse_range(text: str, parts: list[str], index: int) -> tuple[str, int]:
    alg, mark, count = parts[index].partition("#")
    if alg not in ALGORITHMS:
        near = difflib.get_close_matches(alg, ALGORITHMS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        what = f"unknown algorithm {alg!r}" if alg else "the algorithm is missing"
        _bad(text, parts, index, f"{what}; {hint}The algorithms are {', '.join(ALGORITHMS)}")
    if not mark:
        return alg, 1
    if not _DIGITS.fullmatch(count):
        _bad(text, parts, index, f"'#' must be followed by an integer from 1 to 10**18 - 1, got {count!r}")
    if int(count) < 1:
        _bad(text, parts, index, f"'#k' needs k of at least 1, got {count}")
    return alg, int(count)


def _parse_limit(text: str, parts: list[str], index: int, below: int) -> int:
    match = _LIMIT.fullmatch(parts[index])
    if match is None:
        _bad(text, parts, index, "a limit is an integer number of elements with an optional K, k, M, G or T")
    limit = int(match[1]) * _UNITS[match[2]]
    if limit < 1:
        _bad(text, parts, index, "a limit is at least 1 element")
    if limit <= below:
        _bad(text, parts, index, f"limits must ascend, but {limit} elements come after {below}")
    return limit


def _unparse_limit(limit: int) -> str:
    for unit in "TGMK":
        if limit % _UNITS[unit] == 0:
            return f"{limit // _UNITS[unit]}{unit}"
    return str(limit)


def _bad(text: str, parts: list[str], index: int, why: str) -> NoReturn:
    column = sum(len(part) + 1 for part in parts[:index]) + 1
    raise ValueError(f"all_reduce_spec {text!r}: part {index + 1} {parts[index]!r} (column {column}): {why}")
