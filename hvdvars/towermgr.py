"""The methods of tf_cnn_benchmarks' managers: for graphs of TensorFlow 1 with one or more towers in each process.

A replica is one tower of one rank. A caller builds its towers inside `create_outer_variable_scope`, gives all their
gradients to `preprocess_device_grads`, and what came of them to `append_apply_gradients_ops`. Reduction, fusion and
placement are those of `VariableMgr.apply_gradients`. `hvdvars.ownertowers` has the modes with owners.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import tensorflow as tf

from hvdvars import agreement, check, graphscale, meeting, reduce, savable, sparse
from hvdvars.manager import Use, VariableMgr, check_means
from hvdvars.options import Options
from hvdvars.session import require_started, world
from hvdvars.types import Gradient

v1 = tf.compat.v1


@dataclass
class LocalTowers:
    """The towers of this process, with the names that tf_cnn_benchmarks has for it; devices may be set."""

    raw_devices: list[str]
    """One a tower, where it computes."""
    devices: list[Any]
    """The same, or functions that place a tower's variables elsewhere (`get_devices`)."""
    cpu_device: str
    param_server_device: str
    local_parameter_device_flag: str
    enable_auto_loss_scale: bool
    network_topology: Any = None
    """How the devices are linked, as `towers.sum_hierarchically` takes it; None: as in a DGX-1."""

    @property
    def num_gpus(self) -> int:
        """How many towers there are. Local."""
        return len(self.raw_devices)


def describe_towers(options: Options) -> LocalTowers:
    """The towers that `options` ask for: on GPUs where TensorFlow sees some, else on (logical) CPUs. Local."""
    kind = "gpu" if tf.config.list_physical_devices("GPU") else "cpu"
    raw = [f"/{kind}:{number}" for number in range(options.local_towers)]
    device = options.local_parameter_device
    return LocalTowers(raw, list(raw), "/cpu:0", f"/{device}:0", device, options.fp16_enable_auto_loss_scale)


class TowerMgr(VariableMgr):
    """What the managers of all modes share in graphs of TensorFlow 1."""

    saved_prefix = ""
    """What is put before the names in checkpoints of variables that a tower has."""
    partly = False
    """Whether a rank may lack variables of others."""
    tower_average = False
    """Whether the gradients of all replicas are averaged here (unless the caller asked for sums), or summed up."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.benchmark_cnn: Any = describe_towers(options)
        self.use_resource_vars: bool | None = None
        self.staging_delta_ops: list[Any] = []
        self.grad_has_inf_nan: Any = None
        # Verdicts on gradients by which a tower has changed the loss scale.
        self._judged: list[Any] = []
        self._reuse_vars = False
        self._tower_uses: dict[Any, Use] = {}
        # By graph and number of the tower: what optimizers made there, in their order.
        self._made: dict[tuple[Any, int], list[Any]] = {}

    # --- what a mode answers -----------------------------------------------------------------------------------------

    def each_tower_has_variables(self) -> bool:
        """Whether each tower of this process has variables of its own. Local."""
        return True

    def supports_staged_vars(self) -> bool:
        """Whether towers read variables through staging areas. Local."""
        return False

    def preprocess_device_grads(self, device_grads: Sequence[Sequence[tuple[Gradient, Any]]]) -> tuple[list[Any], Any]:
        """Where updates are applied, and a state for the two methods below.

        `device_grads[t][g]` is a pair of gradient and variable, of tower t. Collective where gradients are sent: every
        rank of the group calls it in the same order, with the same number and order of variables.

        Raises:
            ValueError: gradients do not fit their variables, or towers differ; or, on every rank alike, ranks disagree.
            TypeError: a dtype differs from its variable's or cannot be summed.
        In modes with owners, `get_gradients_to_apply` raises these instead.
        """
        raise NotImplementedError

    def get_gradients_to_apply(self, device_num: int, gradient_state: Any) -> list[tuple[Gradient, Any]]:
        """The pairs of gradient and variable to apply on the device of this number among those of the method above.

        In modes with owners: those that this rank owns. Collective there, else local. Raises ValueError where there is
        no such device.
        """
        raise NotImplementedError

    # --- what all modes do alike -------------------------------------------------------------------------------------

    def create_outer_variable_scope(self, device_num: int) -> Any:
        """The variable scope round everything that the tower of this number makes. Local."""
        return v1.variable_scope(f"v{device_num}", reuse=self._reuse_vars, use_resource=self.use_resource_vars)

    def append_apply_gradients_ops(
        self, gradient_state: Any, opt: Any, grads: Sequence[tuple[Gradient, Any]], training_ops: list[Any],
        loss_scale_params: Any = None,
    ) -> None:  # fmt: skip
        """Add to `training_ops` what applies these pairs of gradient and variable with `opt`, and publishes the values.

        `loss_scale_params` (`graphscale.AutoLossScaleParams`) has the caller's loss scale, if it is automatic: every
        rank keeps its own, and all of them change alike. Collective in modes with owners, else local.

        Raises:
            ValueError: the loss scale is automatic, but the manager was not created with one.
            RuntimeError: in modes with owners, `get_gradients_to_apply` was not called before.
        """
        pairs = self._clipped([(g, v) for g, v in grads if g is not None])
        with self._watched() as made:
            self._append(lambda: [opt.apply_gradients(pairs)] if pairs else [], training_ops, loss_scale_params)
        self._note(made, pairs)

    def get_post_init_ops(self) -> list[Any]:
        """What runs once after variables are initialized or restored: rank 0's values go to every variable that is one.

        Every tower's variables count, and what optimizers made. Collective: every rank of the group calls it at the
        same place while it builds the graph, and runs all that it returns together. Raises ValueError where the ranks
        have different variables, TypeError where one cannot be sent; on every rank alike.
        """
        saved = self._saved()
        listed = savable.agree("get_post_init_ops", saved, self.partly)
        return savable.spread(f"{self._name}.init", listed, saved)

    def get_pre_save_ops(self) -> list[Any]:
        """What every rank runs before rank 0 saves: values that owners have come to rank 0. Empty without owners.

        Collective when they run.
        """
        return []

    def get_devices(self) -> list[Any]:
        """A device or a function that gives one, for each tower. Local."""
        return list(self.benchmark_cnn.raw_devices)

    def savable_variables(self) -> dict[str, Any]:
        """Names and variables for `tf.compat.v1.train.Saver`, on rank 0: equal in all modes. Local.

        Tower 0 stands for all; names have no scope of a tower or of master copies.
        """
        return {one.name: one.source for one in self._saved()}

    def trainable_variables_on_device(
        self, rel_device_num: int, abs_device_num: int, writable: bool = False
    ) -> list[Any]:
        """What the tower trains; `writable` asks for the variables themselves where others are read. Local."""
        del rel_device_num, writable
        found = v1.trainable_variables()
        if not self.each_tower_has_variables():
            return found
        return [variable for variable in found if variable.name.startswith(f"v{abs_device_num}/")]

    @contextlib.contextmanager
    def reuse_variables(self) -> Iterator[None]:
        """Inside, variables must exist already: for a second model on the same variables. Local."""
        before, self._reuse_vars = self._reuse_vars, True
        try:
            yield
        finally:
            self._reuse_vars = before

    def _all_uses(self) -> list[Use]:
        return [*super()._all_uses(), *self._tower_uses.values()]

    # --- shared parts ------------------------------------------------------------------------------------------------

    def _saved(self) -> list[savable.Saved]:
        return savable.group(self._kept_variables(), self._aliases(), self.saved_prefix, self._saved_dtype)

    def _saved_name(self, variable: Any) -> str:
        return savable.name_saved(variable, self.saved_prefix)

    def _saved_dtype(self, variable: Any) -> tf.DType:
        return check.dtype_of(variable)

    def _kept_variables(self) -> list[Any]:
        return list(v1.global_variables())

    def _aliases(self) -> dict[int, str]:
        """Counters that an optimizer of a later tower made count as those of the first."""
        graph = v1.get_default_graph()
        first = self._made.get((graph, 0), [])
        found = {}
        for (where, tower), made in self._made.items():
            if where is graph and tower:
                for mine, one in zip(first, made, strict=False):
                    if savable.locate(one).tower is None:
                        found[id(one)] = savable.locate(mine).name
        return found

    @contextlib.contextmanager
    def _watched(self) -> Iterator[list[Any]]:
        """The global variables that are made inside, in a list that is filled at the end."""
        before = {id(variable) for variable in v1.global_variables()}
        made: list[Any] = []
        yield made
        made += [variable for variable in v1.global_variables() if id(variable) not in before]

    def _note(self, made: list[Any], pairs: list[tuple[Gradient, Any]]) -> None:
        tower = savable.locate(pairs[0][1]).tower if pairs else None
        self._made.setdefault((v1.get_default_graph(), int(tower or 0)), []).extend(made)

    def _clipped(self, pairs: list[tuple[Gradient, Any]]) -> list[tuple[Gradient, Any]]:
        gradients = self._clip([gradient for gradient, _ in pairs])
        return [(gradient, variable) for gradient, (_, variable) in zip(gradients, pairs, strict=True)]

    def _append(self, apply: Any, training_ops: list[Any], params: Any) -> None:
        if params is None:
            training_ops.extend(apply())
            return
        # Every rank has a scale of its own; a chief that alone kept it would leave the others behind.
        own, wrong = graphscale.AutoLossScaleParams(*params)._replace(is_chief=True), self.grad_has_inf_nan
        if any(wrong is one for one in self._judged):
            # The first tower has changed the scale; it changes once a step.
            graphscale.append_gradients_if_finite(training_ops, apply, wrong)
            return
        graphscale.append_gradients_with_loss_scale(training_ops, apply, own, wrong)
        if own.enable_auto_loss_scale and own.loss_scale is not None:
            self._judged.append(wrong)

    def _averages(self) -> bool:
        return self.tower_average and self.options.average

    def _tower_use(
        self, function: str, device_grads: Any, add: Callable[[list[list[Gradient]]], list[Gradient]]
    ) -> tuple[Use, list[Gradient]]:
        """The use of the first tower's variables, and what `add` makes of all towers' gradients, as the use wants it.

        Collective: every rank of the group calls it in the same order, while the graph is built.
        """
        require_started(f"VariableMgr.{function}")
        if self.options.verify_every:
            raise ValueError(f"{function}: option verify_every belongs to apply_gradients; leave it out in such graphs")
        gradients, variables = _split(function, device_grads)
        if self.options.none_gradients == "error":
            _refuse_partly_missing(function, gradients, variables)
        sums = add(gradients)
        kinds = tuple(agreement.kind_of(one, self.options.none_gradients) for one in sums)
        key = (tuple(id(variable) for variable in variables), kinds)
        if key not in self._tower_uses:
            use = self._first_tower_use(function, sums, variables, kinds)
            if self._averages():
                counts = meeting.gather_objects(len(gradients), "towers")
                use.factor = world().size / sum(counts)  # the plan's mean is over ranks
            self._tower_uses[key] = use
        use = self._tower_uses[key]
        return use, [_scaled(one, use.factor) for one in sums]

    def _first_tower_use(self, function: str, sums: list[Gradient], variables: list[Any], kinds: Any) -> Use:
        options, number = replace(self.options, average=self._averages()), len(self._tower_uses)
        settings = {
            **asdict(replace(options, local_towers=1)),
            "mode": self.mode,
            "manager": self._name,
            "towers' use": number,
            "enable_auto_loss_scale": bool(self.benchmark_cnn.enable_auto_loss_scale),
        }
        forms = agreement.agree(function, settings, sums, variables, kinds, options.sparse)
        if self._averages():
            check_means(function, variables, forms)
        name = f"{self._name}.towers{number}"
        whole = reduce.plan_reduction(name, forms, options)
        return Use(number, variables, self._plan(f"{name}.owned", variables, forms, whole), whole)


def _scaled(gradient: Gradient, factor: float) -> Gradient:
    if factor == 1.0:
        return gradient
    return sparse.map_values(lambda values: values * tf.cast(factor, values.dtype), gradient)


def _refuse_partly_missing(function: str, gradients: list[list[Gradient]], variables: list[Any]) -> None:
    for index, column in enumerate(zip(*gradients, strict=True)):
        missing = [number for number, gradient in enumerate(column) if gradient is None]
        if missing and len(missing) < len(column):
            raise ValueError(
                f"{function}: the gradient of {check.name_of(variables[index])} is None in towers {missing} only. "
                "Build all towers alike, or use none_gradients='zeros' to count a missing one as zeros."
            )


def _split(function: str, device_grads: Any) -> tuple[list[list[Gradient]], list[Any]]:
    """Every tower's checked gradients, and the first tower's variables."""
    rows = check.check_sequence(function, "device_grads", device_grads)
    if not rows:
        raise ValueError(f"{function}: device_grads is empty; give a list of (gradient, variable) for each tower")
    gradients, variables = [], []
    for number, tower in enumerate(rows):
        pairs = check.check_sequence(function, f"device_grads[{number}]", tower)
        if len(pairs) != len(rows[0]):
            raise ValueError(
                f"{function}: tower {number} has {len(pairs)} gradients, tower 0 has {len(rows[0])}; build all towers "
                "alike"
            )
        own, theirs = check.check_aligned(function, [pair[0] for pair in pairs], [pair[1] for pair in pairs])
        gradients.append(own)
        variables.append(theirs)
    return gradients, variables[0]
