"""Whole checkpoints from any mode into any mode, any placement and any number of ranks.

The file has every variable, the step counter, the learning rate and the whole optimizer state, each slot with its
variable's full shape, wherever the pieces of it were. See `hvdvars.snapshot` for the format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdvars import check, guard, holding, masters, meeting, relay, restoring, slots, snapshot
from hvdvars.holding import Piece
from hvdvars.manager import VariableMgr
from hvdvars.optimizer import identity_of, tf_variable
from hvdvars.owners import VariableMgrLocalFetchFromPS
from hvdvars.session import require_started, world
from hvdvars.types import Variable

_MOST_SHOWN = 8


def save(
    path: str | os.PathLike[str],
    mgr: VariableMgr,
    model: Any = None,
    optimizer: Any = None,
    variables: Sequence[Variable] | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write variables and the optimizer's state to one file, and give its path (as rank 0 was told; `.npz` added).

    `model` counts with all its weights, `variables` with what they are; together they hold all that `optimizer`
    trains. `extra` are JSON-able values of the caller, such as the epoch. Rank 0 writes, to another name first: there
    is a whole file or none. Values that differ between ranks (BatchNormalization statistics, all weights of the
    independent mode) are rank 0's.

    Collective: every rank of the group calls it in the same order, outside of graphs. Flushes the manager.

    Raises:
        ValueError: nothing to save, the ranks' variables differ, or the optimizer keeps state of other variables.
        TypeError: a wrong argument, or values that cannot be saved as numbers.
        OSError: the file cannot be written.
    All of them on every rank alike.
    """
    function = "checkpoint.save"
    _start(function, mgr, optimizer)
    mgr.flush()
    chosen, pieces, scalars = relay.together(function, lambda: _own_state(mgr, optimizer, model, variables, extra))
    guard.exchange(function, {}, [guard.describe(variable) for variable in chosen])
    keys = [[piece.slot, piece.variable, piece.start, list(piece.shape)] for piece in pieces]
    headers = meeting.gather_objects([keys, list(scalars)], "checkpoint")
    values = [piece.values for piece in pieces] + list(scalars.values())
    received = relay.collect(values, "checkpoint")

    def write() -> str:
        whole, shared = holding.assemble(headers, received)
        slots_ = {key: value for key, value in whole.items() if key[0] != masters.SLOT}
        arrays = {f"variable/{i}": slots.read(variable) for i, variable in enumerate(chosen)}
        arrays |= {f"slot/{name}/{index}": value for (name, index), value in slots_.items()}
        arrays |= {f"scalar/{name}": value for name, value in shared.items()}
        arrays |= {f"master/{index}": value for (name, index), value in whole.items() if name == masters.SLOT}
        meta = {
            "variables": [guard.describe(variable) for variable in chosen],
            "optimizer": _described(optimizer, slots_, shared),
            "extra": extra or {},
            "mode": mgr.mode,
            "loss_scale": mgr.saved_loss_scale(),
            "ranks": world().size,
        }
        target = snapshot.file_path(path)
        snapshot.write(target, meta, arrays)
        return str(target)

    return Path(relay.from_root(function, write))


def restore(
    path: str | os.PathLike[str],
    mgr: VariableMgr,
    model: Any = None,
    optimizer: Any = None,
    variables: Sequence[Variable] | None = None,
) -> dict[str, Any]:
    """Give the variables and the optimizer the values in a file of `save`, on every rank; return its `extra`.

    `model` and `variables` are those that were saved, by order, name, shape and dtype; counters that Keras and
    TensorFlow append to names (`dense_7`) may differ. Without `optimizer`, its state in the file is left alone. In
    modes with owners, before the first step, slots are kept on the manager until `apply_gradients` has made a place for
    them; in the other modes a new optimizer is built for all trainable variables. Only rank 0 reads the file. Masters
    take the restored values.
    Gradients that wait on the manager (`variable_consistency="relaxed"`) are dropped.

    Collective: every rank of the group calls it in the same order, outside of graphs. Nothing changes if it raises.

    Raises:
        FileNotFoundError, OSError: rank 0 cannot read the file.
        ValueError: it is damaged, or holds other variables or another optimizer; or the ranks' variables differ.
        TypeError: a wrong argument.
    All of them on every rank alike.
    """
    function = "checkpoint.restore"
    _start(function, mgr, optimizer)
    chosen = relay.together(function, lambda: _chosen(model, variables))
    described = [guard.describe(variable) for variable in chosen]
    guard.exchange(function, {}, described)
    arrays: dict[str, np.ndarray] = {}

    def read() -> list[Any]:
        meta, found = snapshot.read(snapshot.file_path(path))
        _check_variables(path, meta["variables"], described)
        if optimizer is not None:
            restoring.check_optimizer(path, meta["optimizer"], holding.name_of(optimizer))
        wanted = {"variable"} if optimizer is None else {"variable", "slot", "scalar"}
        wanted |= {"master"} if mgr.masters is not None and mgr.masters.exact else set()
        arrays.update({key: value for key, value in found.items() if key.partition("/")[0] in wanted})
        return [meta, relay.layout_of(arrays)]

    meta, layout = relay.from_root(function, read)
    saved = restoring.with_shapes(meta["optimizer"], layout)
    target = relay.together(function, lambda: None if optimizer is None else _target(mgr, optimizer, chosen, saved))
    plain = dict(enumerate(chosen))
    for key, value in relay.deliver(arrays, layout, "checkpoint"):
        kind, _, rest = key.partition("/")
        if kind == "variable":
            slots.write(chosen[int(rest)], value)
        elif kind == "master":
            mgr.masters.restore(plain.pop(int(rest)), value)
        elif target is not None:
            target.take(kind, rest, value)
    if target is not None:
        target.arrived()
        mgr.restored[identity_of(optimizer)] = target
    mgr.adopt(list(plain.values()))
    mgr.drop_pending()
    mgr.restore_loss_scale(meta.get("loss_scale"))
    return meta["extra"]


def _start(function: str, mgr: Any, optimizer: Any) -> None:
    """Refuse a call at a wrong time, and see that every rank makes this one."""
    require_started(function)
    if not isinstance(mgr, VariableMgr):
        raise TypeError(f"{function}: mgr must be what hvdvars.create gave, got {type(mgr).__name__}")
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"{function} works outside of graphs: call it outside of tf.function, in eager mode. In a graph of "
            "TensorFlow 1, run get_pre_save_ops on every rank, and save savable_variables with rank 0's "
            "tf.compat.v1.train.Saver."
        )
    guard.exchange(function, {"mode": mgr.mode, "optimizer": type(optimizer).__name__}, [])


def _chosen(model: Any, variables: Any) -> list[Variable]:
    """All weights of the model, then the given variables, each once."""
    found: list[Variable] = []
    if model is not None:
        weights = getattr(model, "weights", None)
        weights = getattr(model, "variables", None) if weights is None else weights
        if weights is None:
            raise TypeError(f"model must be a Keras model or a tf.Module, got {type(model).__name__}")
        if not weights:
            raise ValueError("the model has no weights yet; build it or call it once, with an input")
        found += weights
    if variables is not None:
        found += check.check_variables("checkpoint", variables)
    if not found:
        raise ValueError("give model= or variables=, what the optimizer trains at least")
    return list({id(tf_variable(variable)): variable for variable in found}.values())


def _own_state(
    mgr: VariableMgr, optimizer: Any, model: Any, variables: Any, extra: Any
) -> tuple[list[Variable], list[Piece], dict[str, np.ndarray]]:
    """The variables to save, and this rank's contribution: pieces of slots, and single values."""
    chosen = _chosen(model, variables)
    if extra is not None and not isinstance(extra, dict):
        raise TypeError(f"extra must be a dict of JSON-able values, got {type(extra).__name__}")
    json.dumps(extra)
    exact = [] if mgr.masters is None else mgr.masters.pieces(chosen)
    if optimizer is None:
        return chosen, exact, {}
    uses = mgr.uses_of(optimizer)
    holding.check_trained(optimizer, uses, chosen)
    held = holding.hold(optimizer, chosen, uses)
    given = {id(tf_variable(variable)) for variable in chosen}
    rest = [variable for variable in held.state.rest if id(tf_variable(variable)) not in given]
    if rest:
        raise ValueError(
            f"the optimizer {held.name} keeps {', '.join(check.name_of(v) for v in rest[:_MOST_SHOWN])}, which belong "
            "to none of the variables to save. Add all that it trains, and what it keeps besides, to variables=."
        )
    first = world().rank == 0
    pieces = list(held.pieces()) if first or not held.everywhere else []
    scalars = {name: slots.read(variable) for name, variable in held.state.scalars.items()}
    waiting = mgr.restored.get(identity_of(optimizer))
    if waiting is not None and first:
        pieces += waiting.pieces(chosen)
        scalars |= waiting.scalars
    return chosen, pieces + exact, scalars


def _described(optimizer: Any, whole: Mapping[tuple[str, int], Any], shared: Mapping[str, Any]) -> Any:
    if optimizer is None:
        return None
    names = sorted({name for name, _ in whole})
    return {"class": holding.name_of(optimizer), "slots": names, "scalars": list(shared)}


def _check_variables(path: Any, saved: Sequence[Any], given: Sequence[Any]) -> None:
    """Refuse a file whose variables are not, in order, those given."""
    problems = []
    if len(saved) != len(given):
        problems.append(f"{len(saved)} variables in the file, {len(given)} here")
    names = [guard.canonical_names([one["name"] for one in each]) for each in (saved, given)]
    for index, (one, two) in enumerate(zip(saved, given, strict=False)):
        same_name = names[0][index] == names[1][index] or len(saved) != len(given)
        if not same_name or any(one[part] != two[part] for part in ("shape", "dtype")):
            shown = [f"{each['name']} {tuple(each['shape'])} {each['dtype']}" for each in (one, two)]
            problems.append(f"variables[{index}] is {shown[0]} in the file and {shown[1]} here")
    if problems:
        more = [f"… and {len(problems) - _MOST_SHOWN} more"] if len(problems) > _MOST_SHOWN else []
        raise ValueError(
            f"{path} holds other variables.\n  " + "\n  ".join(problems[:_MOST_SHOWN] + more) + "\nGive the model or "
            "variables that were saved, in the same order."
        )


def _target(mgr: VariableMgr, optimizer: Any, chosen: Sequence[Variable], saved: Any) -> restoring.Waiting:
    owners = isinstance(mgr, VariableMgrLocalFetchFromPS)
    return restoring.target(optimizer, mgr.uses_of(optimizer), chosen, saved, owners)
