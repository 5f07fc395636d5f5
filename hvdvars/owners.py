"""The modes in which a variable has one owner: gradients go there, updates happen there, values come back from there.

See `hvdvars.mgr` for the other modes and `create`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from hvdvars import broadcast, collectives, masters, optimizer, owner, scaling
from hvdvars.manager import Use, compile_plain, device_of
from hvdvars.options import Options
from hvdvars.ownertowers import CachedTowers, MasterTowers, OwnerTowers, StagedTowers
from hvdvars.reduce import Form, Reduction
from hvdvars.types import Gradient, Variable


class VariableMgrLocalFetchFromPS(OwnerTowers):
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

    def _build(self, use: Use, optimizer_: Any) -> None:
        owner.refuse_optimizer(optimizer_, use.variables, self.options.placement)
        if self.options.placement == "variables":
            mine = owner.owned_variables(use.plan, use.variables)
            if mine:
                self._make_slots(optimizer_, mine)
            return
        if any(optimizer.identity_of(optimizer_) in other.shards for other in self._uses.values()):
            raise ValueError(
                "apply_gradients: this optimizer has slots for other variables or another pattern of None gradients, "
                "cut in another way. Use placement='variables', or one optimizer for each list of variables."
            )
        use.shards[optimizer.identity_of(optimizer_)] = owner.create_shards(use.plan)
        self._make_slots(optimizer_, use.shards[optimizer.identity_of(optimizer_)])

    def _update(self, use: Use, optimizer_: Any, gradients: list[Gradient]) -> None:
        with device_of(self.options):
            mine = owner.reduce_to_owners(use.plan, gradients)
        shards = use.shards.get(optimizer.identity_of(optimizer_), [])
        if shards:
            owner.fill_shards(use.plan, shards, use.variables)
        owned = shards or owner.owned_variables(use.plan, use.variables)
        self._settle(use, optimizer_, mine, lambda ready: optimizer.apply(optimizer_, ready, owned))
        with device_of(self.options):
            owner.publish(use.plan, use.variables, shards)

    def _ready(self, use: Use, optimizer_: Any, gradients: list[Gradient]) -> list[Gradient]:
        clipped, norm = self._clip(gradients), optimizer.global_clipnorm(optimizer_)
        if norm is None:
            return clipped
        # The optimizer sees a part only; clipped here to the norm of all, it leaves its part as it is.
        with device_of(self.options):
            return owner.clip_to_global_norm(use.plan.name, clipped, norm)

    def _finite(self, use: Use, gradients: list[Gradient]) -> tf.Tensor:
        # Each owner sees its part only.
        wrong = tf.cast(tf.logical_not(scaling.all_finite(gradients)), tf.float32)
        with device_of(self.options):
            return tf.equal(collectives.all_reduce(wrong, f"{use.plan.name}.finite"), 0.0)

    def _report(self, use: Use) -> dict[str, Any]:
        plan = use.plan
        clips = any(optimizer.global_clipnorm(one) is not None for one in use.optimizers.values())
        return {
            **super()._report(use),
            "buckets": len(plan.values.buckets),
            "collectives_per_step": plan.collectives + clips + (self._scaling is not None),
            "bytes_per_step": plan.gradients.bytes + plan.values.bytes,
            "sparse": sum(form.kind == "sparse" for form in plan.forms),
            "owners": list(plan.owned_bytes),
        }


class VariableMgrDistributedFetchFromPS(CachedTowers, VariableMgrLocalFetchFromPS):
    """The same on several nodes."""


class _WithMasters(VariableMgrLocalFetchFromPS):
    """Owners apply gradients to masters of their own, which are published to the caller's variables on every rank."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.masters = masters.Masters(options.copy_dtype)

    def adopt(self, variables: Sequence[Variable]) -> None:
        """See `VariableMgr.adopt`."""
        self.masters.adopt(variables)
        masters.adopt_in_shards(list(self._uses.values()), variables)

    def _build(self, use: Use, optimizer_: Any) -> None:
        owner.refuse_optimizer(optimizer_, use.variables, self.options.placement)
        with self._at_masters():
            if self.options.placement == "elements":
                use.shards[optimizer.identity_of(optimizer_)] = self._shards_for(use, optimizer_)
            else:
                owned = owner.owned_variables(use.plan, use.variables)
                self.masters.make(use.variables, owned)
                use.masters = self.masters.held
                optimizer.decay_alike(optimizer_, owned, self.masters.of(owned))
            if self._own(use):
                self._make_slots(optimizer_, self._own(use))

    def _shards_for(self, use: Use, optimizer_: Any) -> list[tf.Variable]:
        """The shards of a use, which are the masters of its variables: nobody else may have others."""
        mine = {id(optimizer.tf_variable(variable)) for variable in use.variables}
        for other in self._uses.values():
            theirs = {id(optimizer.tf_variable(variable)) for variable in other.variables if other.shards}
            if other is not use and (mine & theirs or optimizer.identity_of(optimizer_) in other.shards):
                raise ValueError(
                    "apply_gradients: the masters of these variables, or this optimizer's, are cut for another list of "
                    "variables or another pattern of None gradients. Use placement='variables', or one list and one "
                    "optimizer for these variables."
                )
        if use.shards:
            return masters.shards_of(use)
        shards = owner.create_shards(use.plan)
        owner.fill_shards(use.plan, shards, use.variables)
        return shards

    def _own(self, use: Use) -> list[tf.Variable]:
        """This rank's masters of a use: shards, or aligned with the variables that it owns."""
        if self.options.placement == "elements":
            return masters.shards_of(use)
        return self.masters.of(owner.owned_variables(use.plan, use.variables))

    def _at_masters(self) -> Any:
        return tf.device(f"/{self.options.local_parameter_device}:0")

    def _reduce_and_apply(self, use: Use, optimizer_: Any, gradients: list[Gradient]) -> None:
        with device_of(self.options):
            mine = owner.reduce_to_owners(use.plan, gradients, wide=bool(self.options.copy_dtype))
        own = self._own(use)

        def apply(ready: list[Gradient]) -> None:
            with self._at_masters():
                optimizer.apply(optimizer_, ready, own)

        self._settle(use, optimizer_, masters.as_masters(mine, own), apply)

    def _publish(self, use: Use) -> None:
        with device_of(self.options):
            masters.spread(use.variables, masters.gather(use.plan, self._own(use)))

    def _report(self, use: Use) -> dict[str, Any]:
        own = self._own(use) if use.optimizers else []
        return {**super()._report(use), "master_bytes": sum(int(tf.size(one)) * one.dtype.size for one in own)}


class VariableMgrDistributedReplicated(MasterTowers, _WithMasters):
    """Owner: one rank each, with a master `ps_var/…`. Reduce: to the owner. Publish: to every copy, before the end."""

    mode = "distributed_replicated"

    def _update(self, use: Use, optimizer_: Any, gradients: list[Gradient]) -> None:
        with self._at_masters():
            self.masters.take_in(masters.updated_ones(use.plan, use.variables))
        self._reduce_and_apply(use, optimizer_, gradients)
        self._publish(use)


class VariableMgrLocalFetchFromStagedPS(StagedTowers, _WithMasters):
    """As `parameter_server`, but each step publishes the masters as they are before it, beside its own pass."""

    def broadcast(self, targets: Any) -> None:
        """See `VariableMgr.broadcast`; the owners' masters take the values too."""
        super().broadcast(targets)
        self.adopt(self._broadcast_targets(targets))

    @tf.autograph.experimental.do_not_convert
    def flush(self) -> None:
        """See `VariableMgr.flush`; the variables get the owners' newest values. Collective after the first step."""
        super().flush()
        for use in self._uses.values():
            if use.optimizers:
                self._take_turn(use, "flush")
                use.functions.setdefault("flush", compile_plain(partial(self._publish, use)))()

    def _update(self, use: Use, optimizer_: Any, gradients: list[Gradient]) -> None:
        with device_of(self.options):
            # Nothing here needs this step's gradients, so the collective runs beside the pass that works them out.
            before = masters.gather(use.plan, self._own(use))
        self._reduce_and_apply(use, optimizer_, gradients)
        with device_of(self.options):
            masters.spread(use.variables, before)


class VariableMgrDistributedFetchFromStagedPS(VariableMgrLocalFetchFromStagedPS):
    """The same on several nodes."""

    fetches_to_cpu = True
