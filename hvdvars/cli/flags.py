"""The flags of ``hvdvars train``, checked without TensorFlow; those of ``create`` are made from ``hvdvars.options``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hvdvars import options
from hvdvars.cli import names
from hvdvars.cli.errors import UsageError, launched_rank

_PACKAGES = ("tensorflow", "horovod", "mpi4py", "tqdm", "tabulate")
_OF_TOWERS = ("hierarchical_copy", "local_towers")
"""Options of `create` that say something about several towers in one process; a rank is one tower here."""
_DESCRIPTION = """\
Train a model on all ranks. Works bare (one rank) and under a launcher:

  hvdvars train
  horovodrun -np 2 hvdvars train --variable_update parameter_server
  mpirun -np 2 hvdvars train --data images.npz --model ResNet50 --train_dir runs/1
"""


@dataclass(frozen=True)
class TrainFlags:
    """What ``hvdvars train`` was asked to do; ``options`` are those of ``create`` that were given."""

    data: str
    model: str
    variable_update: str
    options: dict[str, Any]
    optimizer: str
    learning_rate: float | None
    batch_size: int
    epochs: int
    seed: int
    train_dir: Path | None
    json: bool
    quiet: bool


def parse(argv: Sequence[str]) -> TrainFlags | None:
    """Read the flags; ``None`` after ``--help`` and ``--version``, which rank 0 answers.

    Local; loads no TensorFlow. Raises UsageError for flags that are unknown, wrong, or contradict each other, and for
    packages that are missing.
    """
    top, train = _parsers()
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            given, unknown = top.parse_known_args(list(argv))
    except SystemExit:
        if launched_rank() == 0:
            print(said.getvalue(), end="", flush=True)
        return None
    if given.command is None:
        raise UsageError(f"a command is missing\n{top.format_help().rstrip()}")
    if unknown:
        known = [flag for action in train._actions for flag in action.option_strings]
        flag = unknown[0].split("=")[0]
        if flag.removeprefix("--") in _OF_TOWERS:
            raise UsageError(
                f"{flag} is refused: hvdvars train has one tower per rank; start one rank for each device. Several "
                "towers in one process belong to the methods for graphs of TensorFlow 1"
            )
        raise UsageError(f"unknown flag {flag}{names.near(flag, known)} (hvdvars train --help lists all flags)")
    return _checked(vars(given))


def _checked(given: dict[str, Any]) -> TrainFlags:
    wanted = {name: given.pop(name) for name in list(given) if name in options.RULES}
    del given["command"]
    mode = given["variable_update"]
    try:
        options.resolve(mode, **wanted)
    except (TypeError, ValueError) as problem:
        # The message speaks of ``create``, which the user of the command has not called.
        reason = re.sub(r"^create(\('\w+'\))?: ", "", str(problem))
        raise UsageError(f"--variable_update {mode}: {reason}") from None
    given["model"] = names.check_model(given["model"])
    given["optimizer"] = names.check_optimizer(given["optimizer"])
    if wanted.get("placement") == "elements" and given["optimizer"] in names.LAYER_WISE:
        raise UsageError(
            f"--optimizer {given['optimizer']} looks at whole variables, which cannot be cut: use --placement variables"
        )
    _check_packages(given)
    return TrainFlags(options=wanted, **given)


def _check_packages(given: dict[str, Any]) -> None:
    needed = {name: name for name in _PACKAGES}
    if given["data"] == "digits":
        needed["sklearn"] = "scikit-learn"
    if given["train_dir"]:
        needed["matplotlib"] = "matplotlib"
    missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UsageError(
            f"Python packages are missing: {', '.join(missing)}. Run `make` in the project's folder, or "
            "pip install 'hvdvars[train]' beside an installed TensorFlow and Horovod.",
            said_by="node",
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (hvdvars train --help lists all flags)")


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    layout = argparse.RawDescriptionHelpFormatter
    top = _Parser(prog="hvdvars", description="Variable management for TensorFlow on Horovod.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=_version())
    commands = top.add_subparsers(dest="command", parser_class=_Parser, metavar="COMMAND")
    train = commands.add_parser(
        "train", help="train a model", description=_DESCRIPTION, formatter_class=layout, allow_abbrev=False
    )
    _add_work(train.add_argument_group("what to train"))
    _add_output(train.add_argument_group("what to show and keep"))
    group = train.add_argument_group("variable management")
    group.add_argument(
        "--variable_update",
        default="parameter_server",
        metavar="MODE",
        help=f"who owns the variables: {', '.join(options.MODES)} (default: %(default)s)",
    )
    for field in dataclasses.fields(options.Options):
        if field.name not in _OF_TOWERS:
            _add_option(group, field.name, field.default)
    return top, train


def _add_work(group: Any) -> None:
    add = group.add_argument
    add(
        "--data",
        default="digits",
        help="digits (handwritten digits of scikit-learn) or a .npz file with x_train, "
        "y_train, x_test, y_test; uint8 images are divided by 255 (default: %(default)s)",
    )
    add(
        "--model",
        default="cnn",
        help="cnn, mlp, a name in keras.applications (without weights; small images are "
        "enlarged to its minimum) or file.py:function, which returns a model (default: %(default)s)",
    )
    add(
        "--optimizer",
        default="adam",
        help="sgd, momentum, rmsprop, adam, adamw or a name in keras.optimizers (default: %(default)s)",
    )
    add(
        "--learning_rate",
        type=_positive(float),
        default=None,
        help="default: sgd 0.1, momentum 0.05, adam 0.002, else Keras's own",
    )
    add("--batch_size", type=_positive(int), default=32, help="samples per rank and step (default: %(default)s)")
    add("--epochs", type=_positive(int), default=40, help="passes over the data (default: %(default)s)")
    add("--seed", type=_seed, default=0, help="of the model, the order of samples and dropout (default: %(default)s)")


def _add_output(group: Any) -> None:
    add = group.add_argument
    add(
        "--train_dir",
        type=Path,
        default=None,
        help="folder for metrics.jsonl, TensorBoard events, curve.png and the checkpoint; rank 0 creates and fills it",
    )
    add(
        "--json",
        action="store_true",
        help="print one JSON object on standard output at the end, the rest on standard error",
    )
    add("--quiet", action="store_true", help="print only the result")


def _add_option(group: Any, name: str, default: Any) -> None:
    rule = options.RULES[name]
    choices = [choice for choice in rule.choices if choice]
    text = rule.help + (
        f" ({', '.join(choices)}; default: {default or 'none'})" if choices else f" (default: {default})"
    )
    kind: dict[str, Any] = {"type": rule.kind, "metavar": rule.kind.__name__.upper()}
    if rule.kind is bool:
        kind = {"type": _boolean, "nargs": "?", "const": True, "metavar": "true|false"}
    group.add_argument(f"--{name}", default=argparse.SUPPRESS, help=text.replace("%", "%%"), **kind)


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "t", "yes", "y", "1"):
        return True
    if text.lower() in ("false", "f", "no", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false; got {text!r}")


def _positive(kind: type[int] | type[float]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if value > 0 and math.isfinite(value):
                return value
        raise argparse.ArgumentTypeError(f"expected a positive {'integer' if kind is int else 'number'}; got {text!r}")

    return convert


def _seed(text: str) -> int:
    with contextlib.suppress(ValueError):
        if 0 <= int(text) < 2**31:
            return int(text)
    raise argparse.ArgumentTypeError(f"expected an integer from 0 to {2**31 - 1}; got {text!r}")


def _version() -> str:
    from importlib import metadata

    try:
        return f"hvdvars {metadata.version('hvdvars')}"
    except metadata.PackageNotFoundError:
        return "hvdvars (not installed)"
