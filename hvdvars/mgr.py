"""Variable managers: who owns a variable, how gradients meet, how values get back.

A mode is a class that answers these three questions: below, and in `hvdvars.owners` where variables have owners;
`hvdvars.manager` has the rest. `create` picks the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from hvdvars import collectives, hierarchy, optimizer, options, reduce, spec, staging
from hvdvars.manager import Use, VariableMgr, compile_plain, device_of
from hvdvars.options import Options
from hvdvars.owners import (
    VariableMgrDistributedFetchFromPS,
    VariableMgrDistributedFetchFromStagedPS,
    VariableMgrDistributedReplicated,
    VariableMgrLocalFetchFromPS,
    VariableMgrLocalFetchFromStagedPS,
)
from hvdvars.reduce import Form, Reduction
from hvdvars.session import require_started
from hvdvars.towermodes import AllReduceTowers, IndependentTowers
from hvdvars.types import Gradient, Variable


class VariableMgrIndependent(IndependentTowers):
    """Owner: every rank. Reduce: nothing. Publish: nothing, and no initial broadcast: every rank trains alone."""

    mode = "independent"
    alone = True

    def broadcast(self, targets: Any) -> None:
        """Check what was given, and leave each rank its own values. Local."""
        require_started("VariableMgr.broadcast")
        self._broadcast_targets(targets)

    def _plan(self, name: str, variables: list[Variable], forms: Sequence[Form], whole: Reduction) -> Any:
        return whole

    def _reduce(self, use: Use, gradients: list[Gradient]) -> list[Gradient]:
        return list(gradients)

    def _update(self, use: Use, optimizer_: Any, gradients: list[Gradient]) -> None:
        self._settle(use, optimizer_, gradients, lambda ready: optimizer.apply(optimizer_, ready, use.variables))


class VariableMgrHorovod(AllReduceTowers):
    """Owner: every rank. Reduce: all-reduce, fused the best way. Publish: nothing, all ranks apply the same.

    With `variable_consistency="relaxed"` each step reduces and applies the gradients of the step before.
    """

    mode = "horovod"

    @tf.autograph.experimental.do_not_convert
    def flush(self) -> None:
        """See `VariableMgr.flush`. Collective where gradients may wait."""
        super().flush()
        for use in self._uses.values():
            for number, (key, late) in enumerate(use.late.items()):
                self._take_turn(use, f"flush of optimizer {number}")
                if late.waiting.numpy():
                    apply = partial(self._apply_late, use, use.optimizers[key])
                    use.functions.setdefault(("flush", key), compile_plain(apply))()

    def _plan(self, name: str, variables: list[Variable], forms: Sequence[Form], whole: Reduction) -> Any:
        return whole

    def _build(self, use: Use, optimizer_: Any) -> None:
        if self.options.variable_consistency == "strong":
            super()._build(use, optimizer_)
            return
        key, forms = optimizer.identity_of(optimizer_), use.whole.forms
        others = [other.variables for other in self._uses.values() if other is not use and key in other.late]
        staging.refuse(optimizer_, use.variables, others, taken=bool(use.late))
        super()._build(use, optimizer_)
        kinds, shapes = [form.kind for form in forms], [form.shape for form in forms]
        use.late[key] = staging.create(kinds, shapes, [form.dtype for form in forms], self._zeros_first)

    def _update(self, use: Use, optimizer_: Any, gradients: list[Gradient]) -> None:
        late = use.late.get(optimizer.identity_of(optimizer_))
        if late is None:
            self._apply(use, optimizer_, self._reduce(use, gradients))
            return
        # As the loss was multiplied by; applying the gradients of the step before may change it.
        scale = tf.convert_to_tensor(self.loss_scale)
        # Nothing here needs this step's gradients, so the collectives run beside the pass that works them out.
        self._apply_late(use, optimizer_)
        with device_of(self.options):
            staging.put(late, reduce.as_planned(use.whole, gradients), scale)

    def _apply_late(self, use: Use, optimizer_: Any) -> None:
        late = use.late[optimizer.identity_of(optimizer_)]
        self._apply(use, optimizer_, self._reduce(use, staging.take(late)), late)
        staging.drop(late)

    def _apply(self, use: Use, optimizer_: Any, reduced: list[Gradient], late: staging.Late | None = None) -> None:
        self._settle(use, optimizer_, reduced, lambda ready: optimizer.apply(optimizer_, ready, use.variables), late)


class VariableMgrLocalReplicated(VariableMgrHorovod):
    """As `horovod`, with the all-reduce that a single-range spec names, in one stage or inside and across nodes."""

    mode = "replicated"


class VariableMgrDistributedAllReduce(VariableMgrHorovod):
    """As `horovod`, with the all-reduce that the spec names for a tensor's number of elements; a spec is required."""

    mode = "distributed_all_reduce"


class VariableMgrCollectiveAllReduce(VariableMgrHorovod):
    """As `horovod`, with grouped all-reduces in at most k pieces: `collective#k`."""

    mode = "collective_all_reduce"


_CLASSES: dict[str, type[VariableMgr]] = {
    kind.mode: kind
    for kind in (
        VariableMgrIndependent,
        VariableMgrHorovod,
        VariableMgrLocalReplicated,
        VariableMgrDistributedAllReduce,
        VariableMgrCollectiveAllReduce,
        VariableMgrLocalFetchFromPS,
        VariableMgrDistributedReplicated,
    )
}
# By staged_vars, and whether there are several nodes.
_PARAMETER_SERVERS: dict[tuple[bool, bool], type[VariableMgr]] = {
    (False, False): VariableMgrLocalFetchFromPS,
    (False, True): VariableMgrDistributedFetchFromPS,
    (True, False): VariableMgrLocalFetchFromStagedPS,
    (True, True): VariableMgrDistributedFetchFromStagedPS,
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
    check_build(chosen)
    if mode == "parameter_server":
        return _PARAMETER_SERVERS[chosen.staged_vars, place.nodes > 1](chosen)
    return _CLASSES[mode](chosen)


def check_build(chosen: Options) -> None:
    """Refuse options that ask for what this machine or build lacks, and make the process sets that they need.

    Collective where the spec names an algorithm in two stages, as `create`; else local. Raises RuntimeError.
    """
    algs = [part.alg for part in spec.parse(chosen.all_reduce_spec)] if chosen.all_reduce_spec else []
    nccl = [alg for alg in algs if alg.startswith("nccl")]
    if nccl and not chosen.allow_cpu and not collectives.nccl_built():
        raise RuntimeError(
            f"create: {nccl[0]!r} of all_reduce_spec={chosen.all_reduce_spec!r} needs NCCL, which this Horovod was "
            "built without. Build it with NCCL=1 scripts/setup.sh, use the CPU transport with allow_cpu=True, or name "
            "another algorithm, such as 'xring'."
        )
    for name in ("horovod_device", "local_parameter_device"):
        if getattr(chosen, name) == "gpu" and not tf.config.list_logical_devices("GPU"):
            raise RuntimeError(f"create: {name}='gpu', but TensorFlow sees no GPU here. Leave it out or use 'cpu'.")
    if any(alg in spec.HIERARCHICAL for alg in algs):
        hierarchy.establish()
