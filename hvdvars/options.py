"""The options of `create`: their types, choices and defaults, and the modes in which each one means something.

Pure Python, so that a wrong option is refused before TensorFlow or Horovod is loaded. An option given as `None`, or
with its default value, counts as not given; any other value is valid in the mode or refused with the reason.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from hvdvars import spec

MODES: tuple[str, ...] = (
    "independent",
    "replicated",
    "distributed_all_reduce",
    "collective_all_reduce",
    "horovod",
    "parameter_server",
    "distributed_replicated",
)


@dataclass(frozen=True)
class Options:
    """The options in force, one field each; see `RULES` for what each one means."""

    average: bool = True
    all_reduce_spec: str | None = None
    allow_cpu: bool = False
    agg_small_grads_max_bytes: int | None = None
    agg_small_grads_max_group: int | None = None
    allreduce_merge_scope: int | None = None
    gradient_repacking: int | None = None
    compact_gradient_transfer: bool = False
    variable_consistency: str = "strong"
    staged_vars: bool = False
    use_fp16: bool = False
    fp16_loss_scale: float | None = None
    fp16_enable_auto_loss_scale: bool = False
    fp16_inc_loss_scale_every_n: int | None = None
    local_parameter_device: str = "cpu"
    horovod_device: str = ""
    hierarchical_copy: bool = False
    local_towers: int = 1
    fusion: str = "auto"
    placement: str = "variables"
    reduce_to_owner: str = "auto"
    copy_dtype: str = ""
    sparse: str = "auto"
    none_gradients: str = "error"
    gradient_clip: float | None = None
    verify_every: int = 0
    stall_seconds: float = 60.0


@dataclass(frozen=True)
class Rule:
    """What one option takes: `kind` is bool, int, float or str; a str has `choices`, a number a `minimum`."""

    kind: type
    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    above: bool = False
    """The minimum itself is not allowed."""
    zero_is_off: bool = False
    """0 means "not given", as in tf_cnn_benchmarks."""


RULES: dict[str, Rule] = {
    "average": Rule(bool, "mean over all replicas; off: their sum"),
    "all_reduce_spec": Rule(str, "all-reduce algorithm, such as xring#2 (see the grammar)"),
    "allow_cpu": Rule(bool, "nccl in a spec uses the CPU transport where Horovod was built without NCCL"),
    "agg_small_grads_max_bytes": Rule(
        int, "pack gradients of at most this many bytes into shared buffers", minimum=1, zero_is_off=True
    ),
    "agg_small_grads_max_group": Rule(int, "at most this many small gradients in one buffer", minimum=1),
    "allreduce_merge_scope": Rule(int, "this many consecutive gradients form one Horovod group", minimum=1),
    "gradient_repacking": Rule(
        int, "concatenate all gradients and split them into this many", minimum=1, zero_is_off=True
    ),
    "compact_gradient_transfer": Rule(bool, "float16 on the wire, the gradient's own type before and after"),
    "variable_consistency": Rule(str, "relaxed: apply the gradients of the step before", ("strong", "relaxed")),
    "staged_vars": Rule(bool, "read the owners' values one step late, so that publishing overlaps with computing"),
    "use_fp16": Rule(bool, "the loss is multiplied by `mgr.loss_scale`; reduced gradients are divided by it"),
    "fp16_loss_scale": Rule(float, "the (first) loss scale", minimum=0, above=True),
    "fp16_enable_auto_loss_scale": Rule(bool, "halve the loss scale on overflow, double it after normal steps"),
    "fp16_inc_loss_scale_every_n": Rule(int, "normal steps before the loss scale doubles", minimum=1),
    "local_parameter_device": Rule(str, "device of the owners' master copies and of their updates", ("cpu", "gpu")),
    "horovod_device": Rule(str, "device of the collectives; empty: GPU in a GPU build, else CPU", ("", "cpu", "gpu")),
    "hierarchical_copy": Rule(bool, "reduce over local towers along the links between their devices"),
    "local_towers": Rule(int, "towers in this process, for the methods of TensorFlow 1 graphs", minimum=1),
    "fusion": Rule(str, "how small gradients share a collective", ("auto", "pack", "group", "none")),
    "placement": Rule(str, "owners of whole variables, or of even pieces of all", ("variables", "elements")),
    "reduce_to_owner": Rule(
        str, "how gradients reach their owner", ("auto", "all_to_all", "reduce_scatter", "all_reduce")
    ),
    "copy_dtype": Rule(
        str,
        "dtype in which masters are published; masters of float32 and of this dtype are float32",
        ("", "float16", "bfloat16"),
    ),
    "sparse": Rule(str, "how IndexedSlices cross the wire", ("auto", "sparse", "dense")),
    "none_gradients": Rule(str, "zeros: a gradient that is None counts as zeros", ("error", "zeros")),
    "gradient_clip": Rule(
        float, "clip reduced gradients to plus or minus this value before they are applied", minimum=0, above=True
    ),
    "verify_every": Rule(int, "check that replicas are equal every so many steps; 0: never", minimum=0),
    "stall_seconds": Rule(float, "report a collective that waits this long; 0: never", minimum=0),
}

_OWNER_MODES = ("parameter_server", "distributed_replicated")
_ALL_REDUCE_MODES = ("replicated", "distributed_all_reduce", "collective_all_reduce", "horovod")
_NO_REDUCE = "this mode neither reduces nor exchanges anything: every rank keeps its own values"
_NO_BUCKETS = "buckets follow the owners in this mode; use fusion="
_NO_COMPACT = "float16 on the wire belongs to the all-reduce modes"
_NO_OWNER = "variables have no single owner in this mode; use parameter_server"
_NO_RELAXED = "owners apply gradients as they come; use horovod or another mode without owners"
_NO_SPEC = "gradients go to owners here; use reduce_to_owner="
_NO_CHOICE = "this mode picks the all-reduce itself; use replicated or distributed_all_reduce"
_NO_HALVES = "only replicated adds up towers in two halves"
_NO_STAGE = "every copy has the owner's new value when a step returns in this mode; use parameter_server"
_NO_PIECES = "masters are whole variables in this mode; use parameter_server"
_NO_MASTERS = "only distributed_replicated keeps masters beside copies of another dtype"
_NO_LIMIT = "Horovod has one limit for the process: set HOROVOD_STALL_CHECK_TIME_SECONDS before hvdvars.init"


def _refusals(name: str) -> dict[str, str]:
    """Mode → why `name` cannot be set to anything but its default there."""
    if name == "stall_seconds":
        return dict.fromkeys(MODES, _NO_LIMIT)
    if name == "hierarchical_copy":
        return {**dict.fromkeys(set(MODES) - {"replicated"}, _NO_HALVES), "independent": _NO_REDUCE}
    if name in ("gradient_clip", "use_fp16", "local_towers") or name.startswith("fp16_"):
        return {}
    if name == "allow_cpu":
        here = "only the nccl algorithms of an all_reduce_spec ask for NCCL"
        return dict.fromkeys(set(MODES) - {"replicated", "distributed_all_reduce"}, here)
    return {**_refusals_with_owners(name), "independent": _NO_REDUCE}


def _refusals_with_owners(name: str) -> dict[str, str]:
    """The same for options that have to do with owners or with all-reduce."""
    without_owners = dict.fromkeys(_ALL_REDUCE_MODES, _NO_OWNER)
    if name == "copy_dtype":
        return {**dict.fromkeys(_ALL_REDUCE_MODES, _NO_MASTERS), "parameter_server": _NO_MASTERS}
    if name == "staged_vars":
        return {**without_owners, "distributed_replicated": _NO_STAGE}
    if name == "placement":
        return {**without_owners, "distributed_replicated": _NO_PIECES}
    if name in ("reduce_to_owner", "local_parameter_device"):
        return without_owners
    if name == "all_reduce_spec":
        return {**dict.fromkeys(_OWNER_MODES, _NO_SPEC), "horovod": _NO_CHOICE}
    reasons = {"variable_consistency": _NO_RELAXED, "compact_gradient_transfer": _NO_COMPACT}
    if name in reasons or name.startswith("agg_") or name in ("gradient_repacking", "allreduce_merge_scope"):
        return dict.fromkeys(_OWNER_MODES, reasons.get(name, _NO_BUCKETS))
    return {}


def _table_row(name: str) -> dict[str, str | None]:
    refused = _refusals(name)
    return {mode: refused.get(mode) for mode in MODES}


OPTION_TABLE: dict[str, dict[str, str | None]] = {field.name: _table_row(field.name) for field in fields(Options)}
"""Option → mode → `None` where every value is valid, or the reason why only the default is."""

_DEFAULTS = Options()
_FIRST_LOSS_SCALE = 128.0
_NORMAL_STEPS = 1000
_FUSION_CHOICES = ("fusion", "agg_small_grads_max_bytes", "gradient_repacking", "allreduce_merge_scope")


def resolve(mode: str, **options: Any) -> Options:
    """Check the mode and its options, and give the options in force.

    Local. Raises TypeError for an unknown option or a value of the wrong type, ValueError for an unknown mode, a value
    outside the choices, an option that means nothing in the mode, or options that contradict each other.
    """
    _check_mode(mode)
    given: dict[str, Any] = {}
    for name, value in options.items():
        if name not in RULES:
            raise TypeError(f"create({mode!r}): unknown option {name!r}{_near(name, RULES)}")
        value = _check_value(mode, name, value)
        if value is None or value == getattr(_DEFAULTS, name):
            continue
        reason = OPTION_TABLE[name][mode]
        if reason is not None:
            raise ValueError(f"create({mode!r}): option {name}={value!r} is refused: {reason}")
        given[name] = value
    _check_contradictions(mode, given)
    _check_loss_scale(mode, given)
    _check_spec(mode, given)
    _check_nccl(mode, given)
    _check_owners(mode, given)
    _check_towers(mode, given)
    if mode == "collective_all_reduce":
        given.setdefault("all_reduce_spec", "collective")
    if "use_fp16" in given:
        given.setdefault("fp16_loss_scale", _FIRST_LOSS_SCALE)
    if "fp16_enable_auto_loss_scale" in given:
        given.setdefault("fp16_inc_loss_scale_every_n", _NORMAL_STEPS)
    return Options(**given)


def _check_mode(mode: str) -> None:
    if not isinstance(mode, str):
        raise TypeError(f"create: mode must be one of {', '.join(MODES)}; got {mode!r} ({type(mode).__name__})")
    if mode not in MODES:
        raise ValueError(f"create: unknown mode {mode!r}{_near(mode, MODES)}; the modes are {', '.join(MODES)}")


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _check_value(mode: str, name: str, value: Any) -> Any:
    """The value as a plain bool, int, float or str; `None` where it counts as not given."""
    rule = RULES[name]
    if value is None:
        return None
    where = f"create({mode!r}): option {name}"
    plain = _plain(where, rule.kind, value)
    if rule.zero_is_off and plain == 0:
        return None
    if rule.choices and plain not in rule.choices:
        choices = ", ".join(repr(choice) for choice in rule.choices)
        raise ValueError(f"{where} must be one of {choices}; got {value!r}{_near(plain, rule.choices)}")
    if rule.minimum is not None and (plain < rule.minimum or (rule.above and plain == rule.minimum)):
        bound = f"more than {rule.minimum:g}" if rule.above else f"at least {rule.minimum:g}"
        raise ValueError(f"{where} must be {bound}; got {value!r}")
    return plain


def _plain(where: str, kind: type, value: Any) -> Any:
    name = type(value).__name__
    is_bool = isinstance(value, bool) or name in ("bool_", "bool")
    if kind is bool and is_bool:
        return bool(value)
    if kind is str and isinstance(value, str):
        return str(value)
    if kind is int and not is_bool and hasattr(value, "__index__"):
        return operator.index(value)
    if kind is float and not is_bool and isinstance(value, numbers.Real):
        if not math.isfinite(value):
            raise ValueError(f"{where} must be finite; got {value!r}")
        return float(value)
    raise TypeError(f"{where} must be {kind.__name__}; got {value!r} ({name})")


def _check_contradictions(mode: str, given: Mapping[str, Any]) -> None:
    clash = [name for name in _FUSION_CHOICES if name in given]
    if len(clash) > 1:
        shown = " and ".join(f"{name}={given[name]!r}" for name in clash)
        raise ValueError(f"create({mode!r}): {shown} contradict each other: each decides the buckets; give one of them")
    if "agg_small_grads_max_group" in given and "agg_small_grads_max_bytes" not in given:
        raise ValueError(
            f"create({mode!r}): option agg_small_grads_max_group={given['agg_small_grads_max_group']} has no effect "
            "without agg_small_grads_max_bytes; give both"
        )


def _check_loss_scale(mode: str, given: Mapping[str, Any]) -> None:
    needed = {"fp16_inc_loss_scale_every_n": "fp16_enable_auto_loss_scale"}
    for name in given:
        needs = needed.get(name, "use_fp16")
        if name.startswith("fp16_") and needs not in given:
            raise ValueError(
                f"create({mode!r}): option {name}={given[name]!r} has no effect without {needs}; give both"
            )


def _check_owners(mode: str, given: Mapping[str, Any]) -> None:
    if mode == "parameter_server" and "local_parameter_device" in given and "staged_vars" not in given:
        device = given["local_parameter_device"]
        raise ValueError(
            f"create({mode!r}): option local_parameter_device={device!r} is refused: variables stay where the model "
            "created them here; staged_vars=True and distributed_replicated keep masters on a device of their own"
        )
    if mode in _OWNER_MODES and given.get("fusion") == "group":
        raise ValueError(
            f"create({mode!r}): option fusion='group' is refused: Horovod has no groups for all-to-all; "
            "use 'auto' or 'none'"
        )
    if given.get("placement") == "elements" and given.get("sparse") == "sparse":
        raise ValueError(
            f"create({mode!r}): sparse='sparse' and placement='elements' contradict each other: rows cannot be cut; "
            "use placement='variables', or sparse='dense'"
        )


def _check_towers(mode: str, given: Mapping[str, Any]) -> None:
    if "hierarchical_copy" in given and "local_towers" not in given:
        raise ValueError(
            f"create({mode!r}): option hierarchical_copy={given['hierarchical_copy']!r} has no effect with one tower "
            "per rank; give local_towers too, and use the methods for graphs of TensorFlow 1"
        )


def _check_spec(mode: str, given: Mapping[str, Any]) -> None:
    text = given.get("all_reduce_spec")
    if text is None:
        if mode == "distributed_all_reduce":
            raise ValueError(
                f"create({mode!r}): option all_reduce_spec is required in this mode, such as 'pscpu:32K:xring': "
                "tensors of up to 32K elements by pscpu, larger ones by xring"
            )
        return
    ranges = spec.parse(text)
    where = f"create({mode!r}): option all_reduce_spec={text!r}"
    if len(ranges) > 1 and mode != "distributed_all_reduce":
        raise ValueError(
            f"{where} has {len(ranges)} ranges; this mode takes one range without a limit "
            "(hybrid specs belong to distributed_all_reduce)"
        )
    for part in ranges:
        _check_range(mode, where, part, given)
    algs = [part.alg for part in ranges]
    if given.get("horovod_device") == "gpu" and all(alg.startswith("pscpu") for alg in algs):
        raise ValueError(f"{where} and horovod_device='gpu' contradict each other: pscpu works on the CPU; use psgpu")


def _check_nccl(mode: str, given: Mapping[str, Any]) -> None:
    if "allow_cpu" in given and "nccl" not in given.get("all_reduce_spec", ""):
        raise ValueError(
            f"create({mode!r}): option allow_cpu={given['allow_cpu']!r} has no effect without an nccl algorithm in "
            "all_reduce_spec; leave it out"
        )


def _check_range(mode: str, where: str, part: spec.Range, given: Mapping[str, Any]) -> None:
    alg, shards = part.alg, part.shards
    grouped = given.get("fusion") == "group" or "allreduce_merge_scope" in given
    if grouped and (shards > 1 or alg in ("pscpu", "psgpu", *spec.HIERARCHICAL)):
        raise ValueError(f"{where} and Horovod groups (fusion='group', allreduce_merge_scope) contradict each other")
    if "gradient_repacking" in given and shards > 1:
        raise ValueError(f"{where} and gradient_repacking contradict each other: each says in how many pieces")
    if mode == "collective_all_reduce" and alg != "collective":
        raise ValueError(f"{where} must be 'collective' or 'collective#k' in this mode; got {alg!r}; use replicated")
    if alg not in spec.SHARDED and (shards > 1 or (alg in spec.HIERARCHICAL and "gradient_repacking" in given)):
        what = f"drop '#{shards}'" if shards > 1 else "leave out gradient_repacking"
        raise ValueError(f"{where}: {alg!r} works on whole tensors; {what}")
