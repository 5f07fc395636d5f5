"""What all ranks settle before a list of variables is first used: that they mean the same, and how gradients travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvdvars import check, guard, reduce
from hvdvars.reduce import Form
from hvdvars.types import Gradient, Variable


def kind_of(gradient: Gradient, none_gradients: str) -> str:
    """`dense`, `sparse` or `none`, as the gradient came; None counts as dense with `none_gradients="zeros"`. Local."""
    if gradient is None:
        return "dense" if none_gradients == "zeros" else "none"
    return "sparse" if isinstance(gradient, tf.IndexedSlices) else "dense"


def agree(
    function: str,
    settings: Mapping[str, Any],
    gradients: Sequence[Gradient],
    variables: Sequence[Variable],
    kinds: Sequence[str],
    sparse: str,
) -> list[Form]:
    """How each gradient crosses the wire, the same on every rank; aligned with `variables`.

    `settings` are values that have to be equal everywhere, `kinds` this rank's `kind_of` each gradient, `sparse` the
    manager's option. Collective: every rank of the group calls it in the same order, outside of graphs or in a trace.

    Raises:
        ValueError: the ranks' settings or variables differ, or a gradient is None on some ranks only; on every rank.
    """
    described = [
        {**guard.describe(variable), "kind": kind, "rows": _rows(gradient)}
        for variable, kind, gradient in zip(variables, kinds, gradients, strict=True)
    ]
    ranks = guard.exchange(function, settings, described)
    _check_missing(function, ranks)
    forms = []
    for index, variable in enumerate(variables):
        check.check_known_shape(function, variable)
        form = Form("dense", tuple(check.shape_of(variable).as_list()), check.dtype_of(variable).name)
        seen = [rank[index] for rank in ranks]
        kind = reduce.choose_form([one["kind"] for one in seen], [one["rows"] for one in seen], form, sparse, 8)
        forms.append(Form(kind, form.shape, form.dtype))
    return forms


def _rows(gradient: Gradient) -> int | None:
    return check.length_of(gradient.values) if isinstance(gradient, tf.IndexedSlices) else None


def _check_missing(function: str, ranks: Sequence[Sequence[dict[str, Any]]]) -> None:
    problems = []
    for index, first in enumerate(ranks[0]):
        missing = [rank for rank, tensors in enumerate(ranks) if tensors[index]["kind"] == "none"]
        if missing and len(missing) < len(ranks):
            problems.append(f"{first['name']}: None on ranks {missing}, a gradient on the others")
    if problems:
        raise ValueError(
            f"{function}: some gradients are None on some ranks only.\n  " + "\n  ".join(problems[:8]) + "\nGive every "
            "rank the same variables to train, or none_gradients='zeros' to count a missing one as zeros."
        )
