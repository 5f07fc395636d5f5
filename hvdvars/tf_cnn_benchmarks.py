"""Stands in for `variable_mgr`, `variable_mgr_util`, `allreduce` and `batch_allreduce` of tf_cnn_benchmarks.

The managers have the constructors of the original, and train on all ranks of the launcher instead of a gRPC cluster;
`join` tells a checkout's `benchmark_cnn` so. See docs/tf_cnn_benchmarks.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hvdvars import collectives, mgr, spec
from hvdvars.batchreduce import (
    AllReduceSpecAlgorithm,
    BatchAllReduceAlgorithm,
    CopyToDeviceAlgorithm,
    HierarchicalCopyAlgorithm,
    algorithm_from_params,
    merge,
    single_range,
    sum_gradients_all_reduce,
)
from hvdvars.getters import SHADOW_PREFIX as PS_SHADOW_VAR_PREFIX
from hvdvars.getters import (
    OverrideCachingDevice,
    OverrideToLocalVariableIfNotPsVar,
    StagedModelVariable,
    StagedVariableGetter,
)
from hvdvars.graphscale import AutoLossScaleParams, append_gradients_with_loss_scale, get_loss_scale_update_op
from hvdvars.joined import join
from hvdvars.options import Options
from hvdvars.paramdevices import GreedyLoadBalancingStrategy, ParamServerDeviceSetter, byte_size_load_fn
from hvdvars.session import world
from hvdvars.smalltensors import (
    GradPackTuple,
    extract_ranges,
    pack_range,
    pack_small_tensors,
    unpack_grad_tuple,
    unpack_small_tensors,
)
from hvdvars.specnames import (
    AllReduceSpecTuple,
    build_all_reduce_device_prefixes,
    collective_group_key,
    contains_any,
    group_device_names,
    parse_all_reduce_spec,
    parse_general_int,
    split_grads_by_size,
)
from hvdvars.towermgr import TowerMgr
from hvdvars.towers import (
    aggregate_gradients_using_copy,
    aggregate_gradients_using_copy_with_device_selection,
    aggregate_gradients_using_copy_with_variable_colocation,
    aggregate_indexed_slices_gradients,
    aggregate_single_gradient_using_copy,
)

__all__ = [
    "PS_SHADOW_VAR_PREFIX",
    "AllReduceSpecAlgorithm",
    "AllReduceSpecTuple",
    "AutoLossScaleParams",
    "BatchAllReduceAlgorithm",
    "CopyToDeviceAlgorithm",
    "GradPackTuple",
    "GreedyLoadBalancingStrategy",
    "HierarchicalCopyAlgorithm",
    "OverrideCachingDevice",
    "OverrideToLocalVariableIfNotPsVar",
    "ParamServerDeviceSetter",
    "StagedModelVariable",
    "StagedVariableGetter",
    "VariableMgr",
    "VariableMgrCollectiveAllReduce",
    "VariableMgrDistributedAllReduce",
    "VariableMgrDistributedFetchFromPS",
    "VariableMgrDistributedFetchFromStagedPS",
    "VariableMgrDistributedReplicated",
    "VariableMgrIndependent",
    "VariableMgrLocalFetchFromPS",
    "VariableMgrLocalFetchFromStagedPS",
    "VariableMgrLocalReplicated",
    "aggregate_gradients_using_copy",
    "aggregate_gradients_using_copy_with_device_selection",
    "aggregate_gradients_using_copy_with_variable_colocation",
    "aggregate_indexed_slices_gradients",
    "aggregate_single_gradient_using_copy",
    "algorithm_from_params",
    "append_gradients_with_loss_scale",
    "build_all_reduce_device_prefixes",
    "byte_size_load_fn",
    "collective_group_key",
    "contains_any",
    "extract_ranges",
    "get_loss_scale_update_op",
    "group_device_names",
    "join",
    "pack_range",
    "pack_small_tensors",
    "parse_all_reduce_spec",
    "parse_general_int",
    "split_grads_by_size",
    "sum_gradients_all_reduce",
    "unpack_grad_tuple",
    "unpack_small_tensors",
]

VariableMgr = TowerMgr

_DEFAULTS = Options()


class _OfBenchmark(TowerMgr):
    """What the managers below take from a BenchmarkCNN; names in checkpoints are those of the original's first tower.

    So that checkpoints of the original load, of the modes in which each tower has variables.
    """

    saved_prefix = "v0/"

    def _take(self, benchmark_cnn: Any, chosen: Options = _DEFAULTS) -> None:
        collectives.init()
        options = replace(chosen, local_towers=len(benchmark_cnn.raw_devices))
        mgr.check_build(options)
        super().__init__(options)
        self.benchmark_cnn = benchmark_cnn
        self.use_resource_vars = benchmark_cnn.params.use_resource_vars

    def get_post_init_ops(self) -> list[Any]:
        """See `TowerMgr`. Raises RuntimeError where workers were asked for that no launcher has started."""
        asked = getattr(self.benchmark_cnn, "num_workers", 1)
        if asked > world().size:
            raise RuntimeError(
                f"get_post_init_ops: {asked} workers were asked for, but this world has {world().size} rank(s). Start "
                "them with mpirun or horovodrun, and call hvdvars.tf_cnn_benchmarks.join(benchmark_cnn) first; no host "
                "names are needed."
            )
        return super().get_post_init_ops()


class _OfServer(_OfBenchmark):
    """What the managers have in common whose towers share variables."""

    def get_devices(self) -> list[Any]:
        """See `TowerMgr`. Local."""
        local = self.benchmark_cnn
        if local.params.xla_compile and self.use_resource_vars and local.local_parameter_device_flag == "gpu":
            # What XLA has compiled takes resources of one device only.
            return [ParamServerDeviceSetter(device, local.raw_devices[:1]) for device in local.raw_devices]
        return super().get_devices()


class VariableMgrIndependent(_OfBenchmark, mgr.VariableMgrIndependent):
    """Each tower trains by itself."""

    def __init__(self, benchmark_cnn: Any) -> None:
        self._take(benchmark_cnn)


class VariableMgrLocalFetchFromPS(_OfServer, mgr.VariableMgrLocalFetchFromPS):
    """Towers share variables, each of which one rank owns."""

    def __init__(self, benchmark_cnn: Any) -> None:
        self._take(benchmark_cnn)


class VariableMgrLocalFetchFromStagedPS(_OfServer, mgr.VariableMgrLocalFetchFromStagedPS):
    """The same, read one step late."""

    def __init__(self, benchmark_cnn: Any) -> None:
        self._take(benchmark_cnn, Options(staged_vars=True))


class VariableMgrDistributedFetchFromPS(_OfServer, mgr.VariableMgrDistributedFetchFromPS):
    """The same with cached values."""

    def __init__(self, benchmark_cnn: Any) -> None:
        self._take(benchmark_cnn)


class VariableMgrDistributedFetchFromStagedPS(_OfServer, mgr.VariableMgrDistributedFetchFromStagedPS):
    """The same, read one step late through the CPU."""

    def __init__(self, benchmark_cnn: Any) -> None:
        self._take(benchmark_cnn, Options(staged_vars=True))


class VariableMgrLocalReplicated(_OfBenchmark, mgr.VariableMgrLocalReplicated):
    """Each tower has variables; gradients are summed by one algorithm."""

    def __init__(
        self,
        benchmark_cnn: Any,
        all_reduce_spec: str | None,
        agg_small_grads_max_bytes: int,
        agg_small_grads_max_group: int,
        allreduce_merge_scope: int,
    ) -> None:
        params = benchmark_cnn.params
        chosen = Options(
            all_reduce_spec=single_range(all_reduce_spec, "replicated") if all_reduce_spec else None,
            agg_small_grads_max_bytes=agg_small_grads_max_bytes or None,
            agg_small_grads_max_group=agg_small_grads_max_group or None,
            allreduce_merge_scope=allreduce_merge_scope,
            gradient_repacking=params.gradient_repacking or None,
            compact_gradient_transfer=bool(params.use_fp16 and params.compact_gradient_transfer),
            variable_consistency=params.variable_consistency,
            hierarchical_copy=bool(params.hierarchical_copy),
        )
        self._take(benchmark_cnn, merge(chosen))


class VariableMgrDistributedAllReduce(_OfBenchmark, mgr.VariableMgrDistributedAllReduce):
    """Each tower has variables; gradients are summed by the algorithm that the spec has for their size."""

    def __init__(
        self,
        benchmark_cnn: Any,
        all_reduce_spec: str,
        job_name: str,
        num_workers: int,
        agg_small_grads_max_bytes: int,
        agg_small_grads_max_group: int,
        allreduce_merge_scope: int,
    ) -> None:
        del job_name, num_workers  # of the gRPC cluster
        if not all_reduce_spec:
            raise ValueError("distributed_all_reduce: all_reduce_spec is empty; give one such as 'pscpu:32K:xring'")
        spec.parse(all_reduce_spec)
        chosen = Options(
            all_reduce_spec=all_reduce_spec,
            agg_small_grads_max_bytes=agg_small_grads_max_bytes or None,
            agg_small_grads_max_group=agg_small_grads_max_group or None,
            allreduce_merge_scope=allreduce_merge_scope,
        )
        self._take(benchmark_cnn, merge(chosen))


class VariableMgrCollectiveAllReduce(_OfBenchmark, mgr.VariableMgrCollectiveAllReduce):
    """Each tower has variables; gradients are summed in groups."""

    def __init__(
        self,
        benchmark_cnn: Any,
        all_reduce_spec: str,
        num_workers: int,
        num_gpus: int,
        task_id: int,
        allreduce_merge_scope: int,
    ) -> None:
        del num_workers, num_gpus, task_id  # of the gRPC cluster
        if not all_reduce_spec:
            raise ValueError("collective_all_reduce: all_reduce_spec is empty; give 'collective' or 'collective#k'")
        ranges = spec.parse(single_range(all_reduce_spec, "collective_all_reduce"))
        if ranges[0].alg != "collective":
            raise ValueError(
                f"collective_all_reduce: all_reduce_spec={all_reduce_spec!r} must be 'collective' or 'collective#k'"
            )
        chosen = Options(all_reduce_spec=all_reduce_spec, allreduce_merge_scope=allreduce_merge_scope)
        self._take(benchmark_cnn, merge(chosen))


class VariableMgrDistributedReplicated(_OfBenchmark, mgr.VariableMgrDistributedReplicated):
    """Each tower has copies of masters, each of which one rank owns."""

    keeps_untrained_global = False

    def __init__(self, benchmark_cnn: Any) -> None:
        self._take(benchmark_cnn)

    def create_outer_variable_scope(self, device_num: int) -> Any:
        """See `TowerMgr`. Where nothing is trained there are no masters, and the copies are what is restored. Local."""
        params = self.benchmark_cnn.params
        if getattr(params, "eval", False) or params.forward_only:
            # Not local ones: those are initialized again after they were restored.
            return TowerMgr.create_outer_variable_scope(self, device_num)
        return super().create_outer_variable_scope(device_num)

    def _strip_port(self, s: str) -> str:
        return s.removesuffix(":0")

    def _remove_shadow_var_prefix_if_present(self, var_name: str) -> str:
        return var_name.removeprefix(PS_SHADOW_VAR_PREFIX + "/")

    def var_dict_name(self, v: Any) -> str:
        """The name in checkpoints. Local."""
        return self._strip_port(self._remove_shadow_var_prefix_if_present(v.name))
