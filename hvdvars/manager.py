"""What all variable managers share: first use, agreement, slots, steps, reports. `hvdvars.mgr` has the modes.

A mode plans, reduces, applies and publishes in methods that it overrides.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import tensorflow as tf

from hvdvars import (
    agreement,
    broadcast,
    check,
    guard,
    lossscale,
    meeting,
    optimizer,
    reduce,
    relay,
    scaling,
    slots,
    sparse,
    staging,
)
from hvdvars.options import Options
from hvdvars.reduce import Form, Reduction
from hvdvars.session import require_started, world
from hvdvars.types import Gradient, Variable

_numbers = itertools.count()
_MANY = 8
_FORGOTTEN = (
    "Call mgr.broadcast([variables, optimizer]) before the first step, so that all ranks start from rank 0's values "
    "(or create('independent') if every rank is meant to train alone)."
)


@dataclass
class Use:
    """One list of variables that a manager has seen: its plan, and the state that goes with it."""

    number: int
    variables: list[Variable]
    plan: Any
    whole: Reduction
    factor: float = 1.0
    """Before they are sent, gradients are multiplied by this: what the plan's mean over ranks leaves to do."""
    steps: tf.Variable | None = None
    shards: dict[int, list[tf.Variable]] = field(default_factory=dict)
    optimizers: dict[int, Any] = field(default_factory=dict)
    functions: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    late: dict[int, staging.Late] = field(default_factory=dict)
    masters: dict[int, tf.Variable] = field(default_factory=dict)
    """What the optimizer updates in place of a variable, by the id of the `tf.Variable`; see `hvdvars.masters`."""


class VariableMgr:
    """What all modes share. A mode says how to plan, how to reduce, and how to apply and publish."""

    mode = ""
    alone = False
    """Whether every rank trains by itself: nothing is compared or sent."""
    masters: Any = None
    """In modes that keep whole masters beside the variables: those of this rank, a `hvdvars.masters.Masters`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        # In the names of all collectives: two managers in one program never answer each other.
        self._name = f"hvdvars.{next(_numbers)}"
        self._uses: dict[Any, Use] = {}
        # What a checkpoint brought, by the optimizer's id, until the optimizer has slots for it.
        self.restored: dict[int, Any] = {}
        # Zeros wait before the very first step; a run that goes on from a checkpoint has had its first step.
        self._zeros_first = True
        auto = options.fp16_enable_auto_loss_scale and not in_graph()
        self._scaling = lossscale.create(options.fp16_loss_scale or 1.0) if auto else None

    # --- what a mode answers -----------------------------------------------------------------------------------------

    def _plan(self, name: str, variables: list[Variable], forms: Sequence[Form], whole: Reduction) -> Any:
        raise NotImplementedError

    def _update(self, use: Use, optimizer_: Any, gradients: list[Gradient]) -> None:
        """Reduce, apply and publish, in a graph."""
        raise NotImplementedError

    # --- what a caller uses ------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> Any:
        """What to multiply the loss by: a float, 1.0 without `use_fp16`; or a float32 variable if automatic. Local."""
        if self._scaling is not None:
            return self._scaling.scale
        return self.options.fp16_loss_scale or 1.0

    def broadcast(self, targets: Any) -> None:
        """Give rank 0's values to every rank: of variables, optimizers, models, or a list of these.

        An optimizer counts with its step counter, learning rate and, where every rank has them all, its slots.
        Collective: every rank of the group calls it in the same order, outside of graphs.

        Raises:
            ValueError: the ranks' variables differ in number, order, shape or dtype.
            TypeError: something else was given, or a dtype cannot be sent.
        """
        require_started("VariableMgr.broadcast")
        variables = self._broadcast_targets(targets)
        guard.exchange("broadcast", {"mode": self.mode}, [guard.describe(variable) for variable in variables])
        broadcast.broadcast_variables(variables)

    # Inside a user's tf.function, autograph would rewrite everything from here down: half a minute for nothing.
    @tf.autograph.experimental.do_not_convert
    def reduce(self, grads: Sequence[Gradient], variables: Sequence[Variable]) -> list[Gradient]:
        """The reduced gradients, whole, on every rank: the mean over all ranks, or the sum with `average=False`.

        The result is aligned with `grads`, with the same shapes and dtypes; None stays None. IndexedSlices come back
        as IndexedSlices with unique rows, or as a tensor where that was fewer bytes to send.
        Collective: every rank of the group calls it in the same order.

        Raises:
            ValueError: gradients do not fit their variables, or the ranks disagree; on every rank alike.
            TypeError: a dtype cannot be summed, or has no exact mean.
        """
        use, gradients = self._use("reduce", grads, variables)

        def reduced(given: list[Gradient]) -> list[Gradient]:
            return lossscale.unscale(self._reduce(use, given), self.loss_scale)

        if not tf.executing_eagerly():
            return reduced(gradients)
        self._take_turn(use, "reduce")
        function = use.functions.setdefault(0, compile_plain(reduced))
        return function(gradients)

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, optimizer_: Any, grads: Sequence[Gradient], variables: Sequence[Variable]) -> None:
        """Reduce the gradients, let the optimizer apply them where the variables are owned, and publish the values.

        `optimizer_` is a Keras or `tf.compat.v1.train` optimizer, or a callable `apply(grads, variables)` that updates
        each variable by its own gradient. `grads` are aligned with `variables`; a None leaves its variable alone.
        Eager calls run through a `tf.function` made once: what a callable reads from Python is fixed at its first call,
        so keep what changes (a learning rate, say) in a `tf.Variable`.
        Collective: every rank of the group calls it in the same order.

        Raises:
            ValueError: gradients do not fit their variables, or the ranks disagree; on every rank alike.
            TypeError: a dtype cannot be summed, or has no exact mean; or this is no optimizer.
            RuntimeError: at the first step, where the ranks' variables differ.
        """
        optimizer.kind_of(optimizer_)
        use, gradients = self._use("apply_gradients", grads, variables)
        self._prepare(use, optimizer_)
        if not tf.executing_eagerly():
            self._step(use, optimizer_, gradients)
            return
        key = optimizer.identity_of(optimizer_)
        self._take_turn(use, f"apply_gradients with optimizer {list(use.optimizers).index(key)}")
        step = use.functions.setdefault(key, compile_plain(lambda given: self._step(use, optimizer_, given)))
        step(gradients)

    def flush(self) -> None:
        """Apply the gradients that wait, or publish the owners' newest values; before evaluating and saving.

        That is with `variable_consistency="relaxed"`, and with `staged_vars=True`. A second call in a row changes
        nothing, and neither does one where nothing is held back. After it, a relaxed step has nothing to apply, and a
        staged one reads the newest values. Collective where something may be held back: every rank of the group calls
        it in the same order, outside of graphs; local in all other cases.

        Raises:
            RuntimeError: called inside a graph.
        """
        require_started("VariableMgr.flush")
        if not tf.executing_eagerly():
            raise RuntimeError("VariableMgr.flush works outside of graphs: call it outside of tf.function")

    def drop_pending(self) -> None:
        """Forget the gradients that wait, as a restored run does: they belong to other values. Local."""
        self._zeros_first = False
        for use in self._uses.values():
            for late in use.late.values():
                staging.drop(late)

    def adopt(self, variables: Sequence[Variable]) -> None:
        """Let the values of these variables be the newest ones, as after a restore: masters take them. Local."""

    def saved_loss_scale(self) -> list[float] | None:
        """Scale and normal steps of an automatic loss scale, for a checkpoint; None without one. Local."""
        if self._scaling is None:
            return None
        with tf.init_scope():
            return [float(self._scaling.scale.numpy()), int(self._scaling.good_steps.numpy())]

    def restore_loss_scale(self, saved: Sequence[float] | None) -> None:
        """Go on with what `saved_loss_scale` gave, if this manager has an automatic loss scale. Local."""
        if self._scaling is not None and saved is not None:
            self._scaling.scale.assign(saved[0])
            self._scaling.good_steps.assign(int(saved[1]))

    def report(self) -> dict[str, Any]:
        """What this manager does, as JSON-able values: mode, world, options, a plan per list of variables. Local."""
        place = require_started("VariableMgr.report")
        nothing_sent = {"collectives_per_step": 0, "bytes_per_step": 0} if place.size == 1 else {}
        return {
            "mode": self.mode,
            "class": type(self).__name__,
            "world": {"rank": place.rank, "size": place.size, "nodes": place.nodes, "transport": place.transport},
            "options": asdict(self.options),
            "loss_scale": (self.saved_loss_scale() or [self.loss_scale])[0],
            "plans": [{**self._report(use), **nothing_sent} for use in self._all_uses()],
        }

    def uses_of(self, optimizer_: Any) -> list[Use]:
        """The lists of variables, with their plans, that this optimizer has been used for. Local."""
        return [use for use in self._uses.values() if optimizer.identity_of(optimizer_) in use.optimizers]

    def _all_uses(self) -> list[Use]:
        return list(self._uses.values())

    # --- shared parts ------------------------------------------------------------------------------------------------

    def _broadcast_targets(self, targets: Any) -> list[Variable]:
        return broadcast.flatten_targets(targets)

    def _use(
        self, function: str, grads: Sequence[Gradient], variables: Sequence[Variable]
    ) -> tuple[Use, list[Gradient]]:
        """The use of these variables, and the gradients as tensors.

        At the first use, all ranks compare what they are about to do.
        """
        require_started(f"VariableMgr.{function}")
        self._refuse_graph(function)
        gradients, checked = check.check_aligned(function, grads, variables)
        kinds = tuple(agreement.kind_of(gradient, self.options.none_gradients) for gradient in gradients)
        key = (tuple(id(variable) for variable in checked), kinds)
        if key not in self._uses:
            self._uses[key] = self._first_use(function, gradients, checked, kinds)
        return self._uses[key], gradients

    def _first_use(
        self, function: str, gradients: list[Gradient], variables: list[Variable], kinds: tuple[str, ...]
    ) -> Use:
        number = len(self._uses)
        forms = self._agree(function, gradients, variables, kinds, number)
        if self.options.average:
            check_means(function, variables, forms)
        whole = reduce.plan_reduction(f"{self._name}.{number}", forms, self.options)
        plan = self._plan(f"{self._name}.{number}.owned", variables, forms, whole)
        return Use(number, list(variables), plan, whole)

    def _agree(
        self,
        function: str,
        gradients: list[Gradient],
        variables: list[Variable],
        kinds: tuple[str, ...],
        number: int,
    ) -> list[Form]:
        if self.alone:
            return [Form("none", tuple(check.shape_of(one).as_list()), check.dtype_of(one).name) for one in variables]
        settings = {"mode": self.mode, "manager": self._name, "use": number, **asdict(self.options)}
        return agreement.agree(function, settings, gradients, variables, kinds, self.options.sparse)

    def _refuse_graph(self, function: str) -> None:
        if in_graph():
            raise RuntimeError(
                f"{function} works in eager mode and in tf.function, not in a graph of TensorFlow 1. There, use "
                "preprocess_device_grads, get_gradients_to_apply and append_apply_gradients_ops."
            )
        if self.options.local_towers > 1:
            raise ValueError(
                f"{function}: a rank is one tower here, but option local_towers={self.options.local_towers} was given; "
                "it belongs to preprocess_device_grads, in graphs of TensorFlow 1"
            )

    def _take_turn(self, use: Use, call: str) -> None:
        """Refuse eager calls in another order on another rank: each would wait for the others' for ever."""
        if self.alone:
            return
        first = check.name_of(use.variables[0]) if use.variables else "nothing"
        others = f" and {len(use.variables) - 1} more" if len(use.variables) > 1 else ""
        meeting.take_turn(f"{call} {self._name}.{use.number}", f"{call} of {first}{others}")

    def _prepare(self, use: Use, optimizer_: Any) -> None:
        """Create slots and other state, once, outside of any graph."""
        key = optimizer.identity_of(optimizer_)
        if key in use.optimizers:
            return
        if self.alone:
            self._create_state(use, optimizer_)
        else:
            guard.exchange("apply_gradients", {"optimizer": optimizer.describe(optimizer_)}, [])
            guard.verify([*use.variables, *optimizer.shared_state(optimizer_)], _FORGOTTEN, "apply_gradients")
            # An owner may refuse what a rank that owns nothing never sees.
            relay.together("apply_gradients", lambda: self._create_state(use, optimizer_))
        use.optimizers[key] = optimizer_
        if len(use.optimizers) == _MANY and world().rank == 0:
            warnings.warn(
                f"apply_gradients: {_MANY} different optimizers for the same variables. If this is one that is made "
                "anew each step (a lambda, say), make it once: each is traced, and kept.",
                stacklevel=2,
            )

    def _create_state(self, use: Use, optimizer_: Any) -> None:
        if self.options.use_fp16 and optimizer.scales_loss(optimizer_):
            raise ValueError(
                f"apply_gradients: {type(optimizer_).__name__} and use_fp16 would both unscale the gradients. Use its "
                "inner optimizer, or leave out use_fp16."
            )
        with tf.init_scope():
            self._build(use, optimizer_)
            if self.options.verify_every and use.steps is None:
                use.steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvdvars_steps")
            if optimizer.identity_of(optimizer_) in self.restored:
                self.restored[optimizer.identity_of(optimizer_)].settle(use)

    def _build(self, use: Use, optimizer_: Any) -> None:
        self._make_slots(optimizer_, use.variables)

    def _make_slots(self, optimizer_: Any, variables: Sequence[Variable]) -> None:
        optimizer.build(optimizer_, variables)
        if self._scaling is not None or self.options.variable_consistency == "relaxed":
            # Now: the optimizer is called inside a branch of the graph, where no variable can be made.
            slots.create(optimizer_, variables)

    def _step(self, use: Use, optimizer_: Any, gradients: list[Gradient]) -> None:
        self._update(use, optimizer_, gradients)
        if use.steps is None:
            return
        with tf.control_dependencies([use.steps.assign_add(1)]):
            due = tf.equal(use.steps % self.options.verify_every, 0)
        name = f"{self._name}.{use.number}.verify"
        tf.cond(due, lambda: _true_after(guard.verify_in_graph(use.variables, name)), lambda: tf.constant(True))

    def _reduce(self, use: Use, gradients: list[Gradient]) -> list[Gradient]:
        with device_of(self.options):
            return reduce.reduce_gradients(use.whole, gradients)

    def _settle(
        self,
        use: Use,
        optimizer_: Any,
        gradients: list[Gradient],
        apply: Callable[[list[Gradient]], None],
        late: staging.Late | None = None,
    ) -> None:
        """Unscale reduced gradients and apply them, unless none wait in `late`, or one is not finite on any rank."""
        scale = self.loss_scale if late is None else late.scale.read_value()
        plain = gradients if not self.options.use_fp16 else lossscale.unscale(gradients, scale)
        ready = self._ready(use, optimizer_, plain)
        due = None if late is None else late.waiting.read_value()
        if self._scaling is not None:
            finite = self._finite(use, gradients)
            lossscale.advance(self._scaling, finite, self.options.fp16_inc_loss_scale_every_n, due)
            due = finite if due is None else tf.logical_and(due, finite)
        if due is None:
            apply(ready)
            return

        def applied() -> tf.Tensor:
            apply(ready)
            return tf.constant(True)

        tf.cond(due, applied, lambda: tf.constant(False))

    def _ready(self, use: Use, optimizer_: Any, gradients: list[Gradient]) -> list[Gradient]:
        return self._clip(gradients)

    def _finite(self, use: Use, gradients: list[Gradient]) -> tf.Tensor:
        return scaling.all_finite(gradients)

    def _clip(self, gradients: list[Gradient]) -> list[Gradient]:
        limit = self.options.gradient_clip
        if limit is None:
            return gradients
        return [sparse.map_values(lambda values: tf.clip_by_value(values, -limit, limit), one) for one in gradients]

    def _report(self, use: Use) -> dict[str, Any]:
        total = sum(form.bytes for form in use.whole.forms)
        ranges = {"ranges": use.whole.report_ranges()} if self.options.all_reduce_spec else {}
        return {
            "variables": len(use.variables),
            "bytes": total,
            "buckets": len(use.whole.plan.buckets),
            "collectives_per_step": use.whole.collectives,
            "bytes_per_step": use.whole.plan.bytes,
            "sparse": sum(form.kind == "sparse" for form in use.whole.forms),
            "owners": [total] * world().size,
            "pending_bytes": sum(staging.size_of(late) for late in use.late.values()),
            "optimizer_bytes": sum(optimizer.state_bytes(one) for one in use.optimizers.values()),
            **ranges,
        }


def check_means(function: str, variables: Sequence[Variable], forms: Sequence[Form]) -> None:
    """Refuse means that are not exact, with TypeError; equal on all ranks once these have agreed on forms. Local."""
    for variable, form in zip(variables, forms, strict=True):
        if form.kind != "none":
            check.check_mean(function, check.name_of(variable), check.dtype_of(variable))


def in_graph() -> bool:
    """Whether the caller is in a graph of TensorFlow 1, where nothing is eager. Local."""
    with tf.init_scope():
        return not tf.executing_eagerly()


def device_of(chosen: Options) -> Any:
    """The device scope of the collectives. Local."""
    return tf.device(f"/{chosen.horovod_device}:0" if chosen.horovod_device else None)


def compile_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a graph, without XLA and autograph. Local."""
    # Horovod's operations have no XLA kernels here, and autograph would only rewrite our own code.
    return tf.function(function, jit_compile=False, autograph=False, reduce_retracing=True)


def _true_after(operation: Any) -> tf.Tensor:
    with tf.control_dependencies([operation] if operation is not None else []):
        return tf.constant(True)
