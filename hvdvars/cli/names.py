"""What the installed Keras offers under a name, read from its source: importing it would take seconds."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from hvdvars.cli.errors import UsageError

BUILT_IN_MODELS = ("cnn", "mlp")
LAYER_WISE = ("Adafactor", "Lamb", "Muon")
"""Optimizers of Keras that look at whole variables; the core refuses others when it sees them."""

BUILT_IN_OPTIMIZERS = ("sgd", "momentum", "rmsprop", "adam", "adamw")

# Where each Keras keeps the list of what ``tf.keras.<module>`` exports: Keras 3 (two layouts), Keras 2.
_FOLDERS = ("_tf_keras/keras", "api/_tf_keras/keras", "api/_v2/keras", "api/_v2")
_NOT_OPTIMIZERS = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap"}


def check_model(text: str) -> str:
    """The name of the model as it is written in Keras, or ``file.py:function`` as it is.

    Local; loads no TensorFlow. Raises UsageError where there is no such model, file or function.
    """
    path, colon, function = text.rpartition(":")
    if colon or text.endswith(".py"):
        _check_function(text, path, function)
        return text
    return _find("--model", text, BUILT_IN_MODELS, "applications", "file.py:function")


def check_optimizer(text: str) -> str:
    """The name of the optimizer as it is written in Keras. Local. Raises UsageError where there is none."""
    return _find("--optimizer", text, BUILT_IN_OPTIMIZERS, "optimizers", None)


def exported(module: str) -> tuple[str, ...] | None:
    """The classes and functions of ``tf.keras.<module>``, or ``None`` where this Keras's list cannot be read. Local."""
    legacy = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    found = importlib.util.find_spec("tf_keras" if legacy else "keras")
    if found is None or not found.submodule_search_locations:
        return None
    root = Path(next(iter(found.submodule_search_locations)))
    for folder in _FOLDERS:
        try:
            tree = ast.parse((root / folder / module / "__init__.py").read_text("utf-8"))
        except (OSError, SyntaxError):
            continue
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        names = {alias.asname or alias.name for node in imports for alias in node.names}
        return tuple(sorted(name for name in names - _NOT_OPTIMIZERS if name[0].isupper()))
    return None


def near(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the known name closest to ``name``, or nothing."""
    by_lower = {one.lower(): one for one in known}
    match = difflib.get_close_matches(name.lower(), list(by_lower), n=1)
    return f"; did you mean {by_lower[match[0]]!r}?" if match else ""


def _find(flag: str, text: str, built_in: tuple[str, ...], module: str, other: str | None) -> str:
    offered = exported(module)
    by_lower = {name.lower(): name for name in (*(offered or ()), *built_in)}
    if text.lower() in by_lower:
        return by_lower[text.lower()]
    if offered is None:
        return text  # Checked once Keras is loaded.
    choices = [", ".join(built_in), f"a name in keras.{module}", *([other] if other else [])]
    raise UsageError(f"{flag} {text!r} is unknown{near(text, by_lower.values())}; expected {', '.join(choices)}")


def _check_function(text: str, path: str, function: str) -> None:
    if not path.endswith(".py") or not function.isidentifier():
        raise UsageError(f"--model {text!r}: expected file.py:function, such as my_model.py:build")
    try:
        tree = ast.parse(Path(path).read_bytes(), filename=path)
    except OSError as problem:
        raise UsageError(f"--model {text!r}: cannot read {path}: {problem.strerror or problem}", "node") from None
    except (SyntaxError, ValueError) as problem:
        raise UsageError(f"--model {text!r}: {path} is not valid Python: {problem}", "node") from None
    names, complete = _bound_names(tree)
    if complete and function not in names:
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        has = f"it has {', '.join(functions)}" if functions else "it has none"
        raise UsageError(f"--model {text!r}: no function {function!r} in {path}; {has}", "node")


def _bound_names(tree: ast.Module) -> tuple[set[str], bool]:
    """The names that a module's text binds; not complete with ``from x import *``."""
    names: set[str] = set()
    complete = True
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
            complete &= all(alias.name != "*" for alias in node.names)
    return names, complete
