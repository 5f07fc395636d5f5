"""Variable managers: who owns a variable, how gradients meet, how values get back.

A mode is a class below that answers these three questions; everything else is shared. `create` picks the class.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import tensorflow as tf

from hvdvars import (
    agreement,
    broadcast,
    check,
    collectives,
    guard,
    hierarchy,
    meeting,
    optimizer,
    options,
    owner,
    reduce,
    relay,
    spec,
    slots,
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
class _Use:
    """One list of variables that a manager has seen: its plan, and the state that goes with it."""

    number: int
    variables: list[Variable]
    plan: Any
    whole: Reduction
    steps: tf.Variable | None = None
    shards: dict[int, list[tf.Variable]] = field(default_factory=dict)
    optimizers: dict[int, Any] = field(default_factory=dict)
    functions: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    late: dict[int, staging.Late] = field(default_factory=dict)


class VariableMgr:
    """What all modes share. A mode says how to plan, how to reduce, and how to apply and publish."""

    mode = ""

    def __init__(self, options: Options) -> None:
        self.options = options
        # In the names of all collectives: two managers in one program never answer each other.
        self._name = f"hvdvars.{next(_numbers)}"
        self._uses: dict[Any, _Use] = {}
        # What a checkpoint brought, by the optimizer's id, until the optimizer has slots for it.
        self.restored: dict[int, Any] = {}
        # Zeros wait before the very first step; a run that goes on from a checkpoint has had its first step.
        self._zeros_first = True

    # --- what a mode answers -----------------------------------------------------------------------------------------

    def _plan(self, name: str, variables: list[Variable], forms: Sequence[Form], whole: Reduction) -> Any:
        raise NotImplementedError

    def _update(self, use: _Use, optimizer_: Any, gradients: list[Gradient]) -> None:
        """Reduce, apply and publish, in a graph."""
        raise NotImplementedError

    # --- what a caller uses ------------------------------------------------------------------------------------------

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
        if not tf.executing_eagerly():
            return self._reduce(use, gradients)
        self._take_turn(use, "reduce")
        function = use.functions.setdefault(0, _compile(lambda given: self._reduce(use, given)))
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
        key = _identity(optimizer_)
        self._take_turn(use, f"apply_gradients with optimizer {list(use.optimizers).index(key)}")
        step = use.functions.setdefault(key, _compile(lambda given: self._step(use, optimizer_, given)))
        step(gradients)

    def flush(self) -> None:
        """Apply the gradients that wait (`variable_consistency="relaxed"`); call it before evaluating and saving.

        A second call in a row changes nothing, and neither does one where nothing is held back. The step after it has
        nothing to apply. Collective where gradients may wait: every rank of the group calls it in the same order,
        outside of graphs; local in all other cases.

        Raises:
            RuntimeError: called inside a graph.
        """
        require_started("VariableMgr.flush")

    def drop_pending(self) -> None:
        """Forget the gradients that wait, as a restored run does: they belong to other values. Local."""
        self._zeros_first = False
        for use in self._uses.values():
            for late in use.late.values():
                staging.drop(late)

    def report(self) -> dict[str, Any]:
        """What this manager does, as JSON-able values: mode, world, options, a plan per list of variables. Local."""
        place = require_started("VariableMgr.report")
        nothing_sent = {"collectives_per_step": 0, "bytes_per_step": 0} if place.size == 1 else {}
        return {
            "mode": self.mode,
            "class": type(self).__name__,
            "world": {"rank": place.rank, "size": place.size, "nodes": place.nodes, "transport": place.transport},
            "options": asdict(self.options),
            "plans": [{**self._report(use), **nothing_sent} for use in self._uses.values()],
        }

    def uses_of(self, optimizer_: Any) -> list[_Use]:
        """The lists of variables, with their plans, that this optimizer has been used for. Local."""
        return [use for use in self._uses.values() if _identity(optimizer_) in use.optimizers]

    # --- shared parts ------------------------------------------------------------------------------------------------

    def _broadcast_targets(self, targets: Any) -> list[Variable]:
        return broadcast.flatten_targets(targets)

    def _use(
        self, function: str, grads: Sequence[Gradient], variables: Sequence[Variable]
    ) -> tuple[_Use, list[Gradient]]:
        """The use of these variables, and the gradients as tensors.

        At the first use, all ranks compare what they are about to do.
        """
        require_started(f"VariableMgr.{function}")
        gradients, checked = check.check_aligned(function, grads, variables)
        kinds = tuple(agreement.kind_of(gradient, self.options.none_gradients) for gradient in gradients)
        key = (tuple(id(variable) for variable in checked), kinds)
        if key not in self._uses:
            self._uses[key] = self._first_use(function, gradients, checked, kinds)
        return self._uses[key], gradients

    def _first_use(
        self, function: str, gradients: list[Gradient], variables: list[Variable], kinds: tuple[str, ...]
    ) -> _Use:
        number = len(self._uses)
        forms = self._agree(function, gradients, variables, kinds, number)
        for variable, form in zip(variables, forms, strict=True):
            if self.options.average and form.kind != "none":
                check.check_mean(function, check.name_of(variable), check.dtype_of(variable))
        whole = reduce.plan_reduction(f"{self._name}.{number}", forms, self.options)
        plan = self._plan(f"{self._name}.{number}.owned", variables, forms, whole)
        return _Use(number, list(variables), plan, whole)

    def _agree(
        self,
        function: str,
        gradients: list[Gradient],
        variables: list[Variable],
        kinds: tuple[str, ...],
        number: int,
    ) -> list[Form]:
        settings = {"mode": self.mode, "manager": self._name, "use": number, **asdict(self.options)}
        return agreement.agree(function, settings, gradients, variables, kinds, self.options.sparse)

    def _take_turn(self, use: _Use, call: str) -> None:
        """Refuse eager calls in another order on another rank: each would wait for the others' for ever."""
        if self.mode == "independent":
            return
        first = check.name_of(use.variables[0]) if use.variables else "nothing"
        others = f" and {len(use.variables) - 1} more" if len(use.variables) > 1 else ""
        meeting.take_turn(f"{call} {self._name}.{use.number}", f"{call} of {first}{others}")

    def _prepare(self, use: _Use, optimizer_: Any) -> None:
        """Create slots and other state, once, outside of any graph."""
        key = _identity(optimizer_)
        if key in use.optimizers:
            return
        if self.mode == "independent":
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

    def _create_state(self, use: _Use, optimizer_: Any) -> None:
        with tf.init_scope():
            self._build(use, optimizer_)
            if self.options.verify_every and use.steps is None:
                use.steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvdvars_steps")
            if id(optimizer_) in self.restored:
                self.restored[id(optimizer_)].settle(use)

    def _build(self, use: _Use, optimizer_: Any) -> None:
        optimizer.build(optimizer_, use.variables)

    def _step(self, use: _Use, optimizer_: Any, gradients: list[Gradient]) -> None:
        self._update(use, optimizer_, gradients)
        if use.steps is None:
            return
        with tf.control_dependencies([use.steps.assign_add(1)]):
            due = tf.equal(use.steps % self.options.verify_every, 0)
        name = f"{self._name}.{use.number}.verify"
        tf.cond(due, lambda: _true_after(guard.verify_in_graph(use.variables, name)), lambda: tf.constant(True))

    def _reduce(self, use: _Use, gradients: list[Gradient]) -> list[Gradient]:
        with _device(self.options):
            return reduce.reduce_gradients(use.whole, gradients)

    def _clip(self, gradients: list[Gradient]) -> list[Gradient]:
        limit = self.options.gradient_clip
        return gradients if limit is None else [_clip_values(gradient, limit) for gradient in gradients]

    def _report(self, use: _Use) -> dict[str, Any]:
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


class VariableMgrIndependent(VariableMgr):
    """Owner: every rank. Reduce: nothing. Publish: nothing, and no initial broadcast: every rank trains alone."""

    mode = "independent"

    def broadcast(self, targets: Any) -> None:
        """Check what was given, and leave each rank its own values. Local."""
        require_started("VariableMgr.broadcast")
        self._broadcast_targets(targets)

    def _agree(
        self,
        function: str,
        gradients: list[Gradient],
        variables: list[Variable],
        kinds: tuple[str, ...],
        number: int,
    ) -> list[Form]:
        return [Form("none", tuple(check.shape_of(variable)), check.dtype_of(variable).name) for variable in variables]

    def _plan(self, name: str, variables: list[Variable], forms: Sequence[Form], whole: Reduction) -> Any:
        return whole

    def _reduce(self, use: _Use, gradients: list[Gradient]) -> list[Gradient]:
        return list(gradients)

    def _update(self, use: _Use, optimizer_: Any, gradients: list[Gradient]) -> None:
        optimizer.apply(optimizer_, self._clip(gradients), use.variables)


class VariableMgrHorovod(VariableMgr):
    """Owner: every rank. Reduce: all-reduce, fused the best way. Publish: nothing, all ranks apply the same.

    With `variable_consistency="relaxed"` each step reduces and applies the gradients of the step before.
    """

    mode = "horovod"

    @tf.autograph.experimental.do_not_convert
    def flush(self) -> None:
        """See `VariableMgr.flush`. Collective where gradients may wait."""
        super().flush()
        if not tf.executing_eagerly():
            raise RuntimeError("VariableMgr.flush works outside of graphs: call it outside of tf.function")
        for use in self._uses.values():
            for number, (key, late) in enumerate(use.late.items()):
                self._take_turn(use, f"flush of optimizer {number}")
                if late.waiting.numpy():
                    apply = partial(self._apply_late, use, use.optimizers[key])
                    use.functions.setdefault(("flush", key), _compile(apply))()

    def _plan(self, name: str, variables: list[Variable], forms: Sequence[Form], whole: Reduction) -> Any:
        return whole

    def _build(self, use: _Use, optimizer_: Any) -> None:
        if self.options.variable_consistency == "strong":
            super()._build(use, optimizer_)
            return
        key, forms = _identity(optimizer_), use.whole.forms
        others = [other.variables for other in self._uses.values() if other is not use and key in other.late]
        staging.refuse(optimizer_, use.variables, others)
        # Made now: the optimizer is called inside a branch of the graph, where no variable can be made.
        slots.create(optimizer_, use.variables)
        kinds, shapes = [form.kind for form in forms], [form.shape for form in forms]
        use.late[key] = staging.create(kinds, shapes, [form.dtype for form in forms], self._zeros_first)

    def _update(self, use: _Use, optimizer_: Any, gradients: list[Gradient]) -> None:
        late = use.late.get(_identity(optimizer_))
        if late is None:
            self._apply(use, optimizer_, self._reduce(use, gradients))
            return
        # Nothing here needs this step's gradients, so the collectives run beside the pass that works them out.
        self._apply_late(use, optimizer_)
        with _device(self.options):
            staging.put(late, reduce.as_planned(use.whole, gradients))

    def _apply_late(self, use: _Use, optimizer_: Any) -> None:
        late = use.late[_identity(optimizer_)]
        reduced = self._reduce(use, staging.take(late))

        def apply() -> tf.Tensor:
            self._apply(use, optimizer_, reduced)
            return tf.constant(True)

        tf.cond(late.waiting.read_value(), apply, lambda: tf.constant(False))
        staging.drop(late)

    def _apply(self, use: _Use, optimizer_: Any, reduced: list[Gradient]) -> None:
        optimizer.apply(optimizer_, self._clip(reduced), use.variables)


class VariableMgrLocalReplicated(VariableMgrHorovod):
    """As `horovod`, with the all-reduce that a single-range spec names, in one stage or inside and across nodes."""

    mode = "replicated"


class VariableMgrDistributedAllReduce(VariableMgrHorovod):
    """As `horovod`, with the all-reduce that the spec names for a tensor's number of elements; a spec is required."""

    mode = "distributed_all_reduce"


class VariableMgrCollectiveAllReduce(VariableMgrHorovod):
    """As `horovod`, with grouped all-reduces in at most k pieces: `collective#k`."""

    mode = "collective_all_reduce"


class VariableMgrLocalFetchFromPS(VariableMgr):
    """Owner: one rank each. Reduce: to the owner. Publish: the owner's value to all. Ranks of one node."""

    mode = "parameter_server"

    def _broadcast_targets(self, targets: Any) -> list[Variable]:
        # Slots live on their owners only, and differ from rank to rank: they start from zero on each.
        return broadcast.flatten_targets(targets, slots=False)

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._owners: dict[int, tuple[int, int]] = {}

    def _plan(self, name: str, variables: list[Variable], forms: Sequence[Form], whole: Reduction) -> owner.Ownership:
        if self.options.placement == "elements":
            return owner.plan_ownership(name, forms, self.options)
        return owner.plan_ownership(name, forms, self.options, owner.keep_owners(self._owners, variables, forms))

    def _build(self, use: _Use, optimizer_: Any) -> None:
        owner.refuse_optimizer(optimizer_, use.variables, self.options.placement)
        if self.options.placement == "variables":
            mine = owner.owned_variables(use.plan, use.variables)
            if mine:
                optimizer.build(optimizer_, mine)
            return
        if any(id(optimizer_) in other.shards for other in self._uses.values()):
            raise ValueError(
                "apply_gradients: this optimizer has slots for other variables or another pattern of None gradients, "
                "cut in another way. Use placement='variables', or one optimizer for each list of variables."
            )
        use.shards[id(optimizer_)] = owner.create_shards(use.plan)
        optimizer.build(optimizer_, use.shards[id(optimizer_)])

    def _update(self, use: _Use, optimizer_: Any, gradients: list[Gradient]) -> None:
        with _device(self.options):
            mine = self._clip(owner.reduce_to_owners(use.plan, gradients))
            norm = optimizer.global_clipnorm(optimizer_)
            if norm is not None:
                # The optimizer sees a part only; clipped here to the norm of all, it leaves its part as it is.
                mine = owner.clip_to_global_norm(use.plan.name, mine, norm)
        shards = use.shards.get(id(optimizer_), [])
        if shards:
            owner.update_shards(use.plan, shards, mine, use.variables, optimizer_)
        else:
            optimizer.apply(optimizer_, mine, owner.owned_variables(use.plan, use.variables))
        with _device(self.options):
            owner.publish(use.plan, use.variables, shards)

    def _report(self, use: _Use) -> dict[str, Any]:
        plan = use.plan
        clips = any(optimizer.global_clipnorm(one) is not None for one in use.optimizers.values())
        return {
            **super()._report(use),
            "buckets": len(plan.values.buckets),
            "collectives_per_step": plan.collectives + clips,
            "bytes_per_step": plan.gradients.bytes + plan.values.bytes,
            "sparse": sum(form.kind == "sparse" for form in plan.forms),
            "owners": list(plan.owned_bytes),
        }


class VariableMgrDistributedFetchFromPS(VariableMgrLocalFetchFromPS):
    """The same on several nodes."""


_CLASSES: dict[str, type[VariableMgr]] = {
    kind.mode: kind
    for kind in (
        VariableMgrIndependent,
        VariableMgrHorovod,
        VariableMgrLocalReplicated,
        VariableMgrDistributedAllReduce,
        VariableMgrCollectiveAllReduce,
        VariableMgrLocalFetchFromPS,
    )
}


def create(mode: str, **given: Any) -> VariableMgr:
    """The manager of a mode, by its name; see `hvdvars.options` for the modes and what each option means.

    Local, but every rank creates the same managers in the same order: their numbers are part of the names on the wire.
    Collective where the spec names an algorithm in two stages (`nccl/xring`, …): the first such call makes the process
    sets of the nodes, outside of graphs and while nothing else is being sent.

    Raises:
        ValueError: there is no such mode, or an option has a wrong value or means nothing in this mode.
        TypeError: an option has a wrong type, or there is no such option.
        RuntimeError: `hvdvars.init` has not been called, or the build lacks what an option asks for.
    """
    chosen = options.resolve(mode, **given)
    place = require_started("create")
    algs = [part.alg for part in spec.parse(chosen.all_reduce_spec)] if chosen.all_reduce_spec else []
    nccl = [alg for alg in algs if alg.startswith("nccl")]
    if nccl and not chosen.allow_cpu and not collectives.nccl_built():
        raise RuntimeError(
            f"create: {nccl[0]!r} of all_reduce_spec={chosen.all_reduce_spec!r} needs NCCL, which this Horovod was "
            "built without. Build it with NCCL=1 scripts/setup.sh, use the CPU transport with allow_cpu=True, or name "
            "another algorithm, such as 'xring'."
        )
    if chosen.horovod_device == "gpu" and not tf.config.list_logical_devices("GPU"):
        raise RuntimeError("create: horovod_device='gpu', but TensorFlow sees no GPU here. Leave it out or use 'cpu'.")
    if any(alg in spec.HIERARCHICAL for alg in algs):
        hierarchy.establish()
    if mode == "parameter_server" and place.nodes > 1:
        return VariableMgrDistributedFetchFromPS(chosen)
    return _CLASSES[mode](chosen)


def _clip_values(gradient: Gradient, limit: float) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        clipped = tf.clip_by_value(gradient.values, -limit, limit)
        return tf.IndexedSlices(clipped, gradient.indices, gradient.dense_shape)
    return None if gradient is None else tf.clip_by_value(gradient, -limit, limit)


def _device(chosen: Options) -> Any:
    return tf.device(f"/{chosen.horovod_device}:0" if chosen.horovod_device else None)


def _identity(optimizer_: Any) -> Any:
    """What tells optimizers apart: a bound method is a new object each time it is named."""
    method = getattr(optimizer_, "__func__", None)
    return id(optimizer_) if method is None else (id(optimizer_.__self__), id(method))


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    # Horovod's operations have no XLA kernels here, and autograph would only rewrite our own code.
    return tf.function(function, jit_compile=False, autograph=False, reduce_retracing=True)


def _true_after(operation: Any) -> tf.Tensor:
    with tf.control_dependencies([operation] if operation is not None else []):
        return tf.constant(True)
