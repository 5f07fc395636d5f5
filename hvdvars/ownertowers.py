"""Towers of modes with owners, in graphs of TensorFlow 1: gradients meet at the owner, which applies them for all.

Towers of one process share variables, or have a copy each of masters on the owners (`MasterTowers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdvars import check, collectives, getters, graphs, meeting, owner, paramdevices, savable, scaling, sparse, towers
from hvdvars.manager import Use, device_of
from hvdvars.options import Options
from hvdvars.session import world
from hvdvars.towermgr import TowerMgr
from hvdvars.types import Gradient

v1 = tf.compat.v1

_SMALL_ELEMENTS = 1024 * 64
"""Variables below this are all cached on one device."""


class OwnerTowers(TowerMgr):
    """The towers of a process share its variables; the mean of all replicas' gradients is applied by the owner."""

    tower_average = True
    partly = True

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        # By graph: name, holder, shape and dtype of what an optimizer keeps on one rank only.
        self._kept_elsewhere: dict[Any, list[tuple[str, int, tuple[int, ...], str]]] = {}
        # Of each reduction: its state, its use, its collectives, and the verdict on its gradients.
        self._reduced: list[tuple[Any, Use, list[tf.Operation], Any]] = []
        # By id: what rank 0 calls an optimizer's counter. The graph numbers counters, and not every rank has them all.
        self._counters: dict[int, tuple[Any, str]] = {}

    def each_tower_has_variables(self) -> bool:
        """See `TowerMgr`. Local."""
        return False

    def create_outer_variable_scope(self, device_num: int) -> Any:
        """See `TowerMgr`: one scope, reused by all towers but the first. Local."""
        return self._shared_scope(device_num, None)

    def preprocess_device_grads(self, device_grads: Sequence[Sequence[tuple[Gradient, Any]]]) -> tuple[list[Any], Any]:
        """See `TowerMgr`. The state are the gradients as they came. Local."""
        return [self.benchmark_cnn.param_server_device], device_grads

    def get_gradients_to_apply(self, device_num: int, gradient_state: Any) -> list[tuple[Gradient, Any]]:
        """See `TowerMgr`: the mean over all replicas, of the variables that this rank owns. Collective."""
        use, mine = self._reduce_towers(device_num, gradient_state)
        owned = owner.owned_variables(use.plan, use.variables)
        return [(gradient, one) for gradient, one in zip(mine, owned, strict=True) if gradient is not None]

    def append_apply_gradients_ops(
        self, gradient_state: Any, opt: Any, grads: Sequence[tuple[Gradient, Any]], training_ops: list[Any],
        loss_scale_params: Any = None,
    ) -> None:  # fmt: skip
        """See `TowerMgr`; the owners' new values then go to every rank. Collective."""
        use, sent, self.grad_has_inf_nan = self._found(gradient_state)
        applied: list[Any] = []
        with self._watched() as made, tf.control_dependencies(self._before_apply()):
            super().append_apply_gradients_ops(gradient_state, opt, grads, applied, loss_scale_params)
        if world().rank == 0:
            self._apply_never(opt, self._others(use))
        self._name_counters(opt)
        self._tell_kept([*made, *self._own_masters(use)])
        # A rank sends its gradients also where it applies none of what it receives.
        training_ops.extend([*applied, *sent])
        with tf.control_dependencies([*applied, *self._before_apply()]), device_of(self.options):
            training_ops.extend(self._publish_towers(use, gradient_state))

    def get_pre_save_ops(self) -> list[Any]:
        """See `TowerMgr`: what optimizers keep on one rank only. Collective when they run."""
        rows = self._kept_elsewhere.get(v1.get_default_graph(), [])
        here = {one.name: one.source for one in self._saved()}
        return savable.collect(f"{self._name}.save", rows, here)

    def get_devices(self) -> list[Any]:
        """See `TowerMgr`: functions that place variables on the parameter device, or on the tower with least. Local."""
        local = self.benchmark_cnn
        if local.local_parameter_device_flag == "gpu":
            return [paramdevices.ParamServerDeviceSetter(device, local.raw_devices) for device in local.raw_devices]
        place = local.param_server_device
        return [
            v1.train.replica_device_setter(worker_device=device, ps_device=place, ps_tasks=1)
            for device in local.raw_devices
        ]

    # --- shared parts ------------------------------------------------------------------------------------------------

    def _shared_scope(self, device_num: int, getter: Any) -> Any:
        reuse = bool(device_num) or self._reuse_vars
        return v1.variable_scope("v", reuse=reuse, custom_getter=getter, use_resource=self.use_resource_vars)

    def _before_apply(self) -> list[Any]:
        """What has to have read the variables before they change."""
        return []

    def _reduce_towers(self, device_num: int, gradient_state: Any) -> tuple[Use, list[Gradient]]:
        """This rank's reduced gradients, aligned with the variables that it owns."""
        if device_num != 0:
            raise ValueError(f"get_gradients_to_apply: there is one device, of number 0; got {device_num}")
        if self.options.placement == "elements":
            raise ValueError(
                "get_gradients_to_apply: placement='elements' belongs to apply_gradients; in a graph of TensorFlow 1 "
                "use placement='variables'"
            )
        use, sums = self._tower_use("get_gradients_to_apply", gradient_state, self._add_towers)
        with device_of(self.options), graphs.watched() as sent:
            mine = owner.reduce_to_owners(use.plan, sums, wide=bool(self.options.copy_dtype))
            if self.benchmark_cnn.enable_auto_loss_scale:
                wrong = tf.cast(tf.logical_not(scaling.all_finite(mine)), tf.float32)
                self.grad_has_inf_nan = collectives.all_reduce(wrong, f"{use.plan.name}.finite") > 0.0
        self._reduced.append((gradient_state, use, sent, self.grad_has_inf_nan))
        return use, mine

    def _add_towers(self, gradients: list[list[Gradient]]) -> list[Gradient]:
        return towers.sum_all_towers(gradients, [self.benchmark_cnn.param_server_device])

    def _found(self, gradient_state: Any) -> tuple[Use, list[tf.Operation], Any]:
        """What was reduced from this very state: two of them may have the same variables."""
        for state, *found in reversed(self._reduced):
            if state is gradient_state:
                return tuple(found)
        raise RuntimeError(
            "append_apply_gradients_ops: call get_gradients_to_apply first, with the same gradient_state, on every rank"
        )

    def _others(self, use: Use) -> list[Any]:
        """The variables that other ranks own and update, as this rank has them."""
        owners = use.plan.owners
        return [use.variables[index] for index in use.plan.updated if owners[index] != world().rank]

    def _apply_never(self, opt: Any, variables: list[Any]) -> None:
        """Let the optimizer make what it keeps for these variables, which is saved here; the updates are not run."""
        if variables:
            opt.apply_gradients([(tf.zeros(check.shape_of(one), check.dtype_of(one)), one) for one in variables])

    def _name_counters(self, opt: Any) -> None:
        """Let what an optimizer keeps once, for all variables, have rank 0's name. Collective."""
        found = list(getattr(opt, "_non_slot_variables", list)())
        mine = [one for one in found if one.graph is v1.get_default_graph()]
        ranks = meeting.gather_objects([check.name_of(one) for one in mine], "counters")
        self._counters.update({id(one): (one, name) for one, name in zip(mine, ranks[0], strict=False)})

    def _aliases(self) -> dict[int, str]:
        return {key: name for key, (_, name) in self._counters.items()}

    def _saved_name(self, variable: Any) -> str:
        return self._aliases().get(id(variable)) or super()._saved_name(variable)

    def _tell_kept(self, made: list[Any]) -> None:
        """Find out which rank has the value of each thing that only an owner updates. Collective."""
        mine = [[self._saved_name(one), check.shape_of(one).as_list(), check.dtype_of(one).name] for one in made]
        holders: dict[str, tuple[str, int, tuple[int, ...], str]] = {}
        for rank, rows in enumerate(meeting.gather_objects(mine, "kept")):
            for name, shape, dtype in rows:
                holders.setdefault(name, (name, rank, tuple(shape), dtype))
        known = self._kept_elsewhere.setdefault(v1.get_default_graph(), [])
        known += [row for row in holders.values() if row[1] != 0]

    def _publish_towers(self, use: Use, gradient_state: Any) -> list[Any]:
        """Operations that give the owners' values to every rank."""
        values = [
            variable.read_value() if one == world().rank else None
            for variable, one in zip(use.variables, use.plan.owners, strict=True)
        ]
        operations: list[Any] = []
        for index, value in owner.gather_values(use.plan, values):
            # Used on every rank, so that the collective runs there.
            operations.append(value.op)
            if use.plan.owners[index] != world().rank:
                operations.append(use.variables[index].assign(value, read_value=False))
        return operations

    def _own_masters(self, use: Use) -> list[Any]:
        """Masters on this rank whose values their copies do not have whole."""
        return []


class CachedTowers(OwnerTowers):
    """As `OwnerTowers`, with a cached value of each variable: of large ones where least is cached."""

    def create_outer_variable_scope(self, device_num: int) -> Any:
        """See `TowerMgr`. Local."""
        local = self.benchmark_cnn
        devices = local.raw_devices if local.local_parameter_device_flag == "gpu" else [local.cpu_device]
        getter = getters.OverrideCachingDevice(devices, local.cpu_device, _SMALL_ELEMENTS)
        return self._shared_scope(device_num, getter)


class StagedTowers(OwnerTowers):
    """As `OwnerTowers`, with variables that are read one step late: values as they were before the step before."""

    fetches_to_cpu = False
    """Whether a value is brought to the CPU once, for all towers."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.staging_vars_on_devices: list[dict[str, Any]] = [{} for _ in self.benchmark_cnn.raw_devices]
        self.staged_vars_on_cpu: dict[str, Any] = {}

    def supports_staged_vars(self) -> bool:
        """See `TowerMgr`. Local."""
        return True

    def create_outer_variable_scope(self, device_num: int) -> Any:
        """See `TowerMgr`. Local."""
        local = self.benchmark_cnn
        cpu = local.cpu_device if self.fetches_to_cpu else None
        self._custom_getter = getters.StagedVariableGetter(device_num, local.raw_devices, cpu, self)
        return self._shared_scope(device_num, self._custom_getter)

    def trainable_variables_on_device(
        self, rel_device_num: int, abs_device_num: int, writable: bool = False
    ) -> list[Any]:
        """See `TowerMgr`: the staged values, or the variables if `writable`. Local."""
        return self._custom_getter.trainable_variables_on_device(rel_device_num, abs_device_num, writable)

    def _before_apply(self) -> list[Any]:
        return [put for staged in self.staging_vars_on_devices for put, _ in staged.values()]


class MasterTowers(OwnerTowers):
    """Every tower has a copy of each variable; the owner has a master, to which it applies the mean of gradients.

    Rank 0 has the others' masters too, for what it saves.
    """

    keeps_untrained_global = True
    """Whether what is not trained stays a global variable: local ones forget what was restored."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        # By the id of the variable in the graph; `masters` is for eager mode.
        self._graph_masters: dict[int, Any] = {}

    def each_tower_has_variables(self) -> bool:
        """See `TowerMgr`. Local."""
        return True

    def create_outer_variable_scope(self, device_num: int) -> Any:
        """See `TowerMgr`: trained variables are local, since the masters are what is saved. Local."""
        getter = getters.OverrideToLocalVariableIfNotPsVar(only_trained=self.keeps_untrained_global)
        return v1.variable_scope(
            f"v{device_num}", reuse=self._reuse_vars, custom_getter=getter, use_resource=self.use_resource_vars
        )

    def get_gradients_to_apply(self, device_num: int, gradient_state: Any) -> list[tuple[Gradient, Any]]:
        """See `TowerMgr`: pairs of gradient and master, of the variables that this rank owns. Collective."""
        use, mine = self._reduce_towers(device_num, gradient_state)
        owned = owner.owned_variables(use.plan, use.variables)
        pairs = [(gradient, self._master_of(one)) for gradient, one in zip(mine, owned, strict=True)]
        if world().rank == 0:
            # It saves all of them, those too that have no gradient here and another owner.
            for one in use.variables:
                self._master_of(one)
        return [
            (sparse.cast(gradient, master.dtype.base_dtype), master)
            for gradient, master in pairs
            if gradient is not None
        ]

    def get_devices(self) -> list[Any]:
        """See `TowerMgr`: the towers' own. Local."""
        return list(self.benchmark_cnn.raw_devices)

    def _kept_variables(self) -> list[Any]:
        copies = [one for one in v1.local_variables() if savable.locate(one).tower is not None]
        return [*v1.global_variables(), *copies]

    def _saved_dtype(self, variable: Any) -> tf.DType:
        # Where the master is on another rank, a copy stands for it.
        trained = any(variable is one for one in v1.trainable_variables())
        return self._master_dtype(variable) if trained else super()._saved_dtype(variable)

    def _master_of(self, variable: Any) -> Any:
        if id(variable) not in self._graph_masters:
            self._graph_masters[id(variable)] = v1.get_variable(
                f"{getters.SHADOW_PREFIX}/{check.name_of(variable)}",
                initializer=tf.cast(variable.initial_value, self._master_dtype(variable)),
                trainable=True,
                use_resource=self.use_resource_vars,
            )
        return self._graph_masters[id(variable)]

    def _master_dtype(self, variable: Any) -> tf.DType:
        dtype = check.dtype_of(variable)
        return tf.float32 if self.options.copy_dtype and dtype.size == 2 else dtype

    def _others(self, use: Use) -> list[Any]:
        return [self._master_of(variable) for variable in super()._others(use)]

    def _own_masters(self, use: Use) -> list[Any]:
        if not self.options.copy_dtype:
            return []
        return [self._master_of(one) for one in owner.owned_variables(use.plan, use.variables)]

    def _publish_towers(self, use: Use, gradient_state: Any) -> list[Any]:
        """Operations that give the masters' values to every copy of every tower and rank."""
        values = [
            self._master_of(variable).read_value() if one == world().rank else None
            for variable, one in zip(use.variables, use.plan.owners, strict=True)
        ]
        operations: list[Any] = []
        for index, value in owner.gather_values(use.plan, values):
            operations.append(value.op)
            targets = [tower[index][1] for tower in gradient_state]
            if world().rank == 0 and use.plan.owners[index] != 0:
                targets.append(self._master_of(use.variables[index]))
            for target in targets:
                operations.append(target.assign(tf.cast(value, target.dtype.base_dtype), read_value=False))
        return operations
