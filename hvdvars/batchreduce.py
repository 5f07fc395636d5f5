"""The functions and classes by which tf_cnn_benchmarks reduces lists of tensors, over local towers and all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from hvdvars import collectives, mgr, smalltensors, spec
from hvdvars.options import Options


@dataclass(frozen=True)
class _Place:
    """What a manager wants to know of the variable that a tensor is the gradient of, where there is none."""

    name: str
    shape: tf.TensorShape
    dtype: tf.DType

    def assign(self, value: Any) -> None:
        """There is nothing to assign to. Local. Raises TypeError."""
        raise TypeError(f"{self.name} is a tensor, not a variable")


def reduce_towers(
    options: Options, tower_tensors: Sequence[Sequence[Any]], topology: Any = None, mean: bool = False
) -> tuple[list[list[Any]], list[Any]]:
    """The sums (or means) of tensors over towers and ranks, for each tower, and what has to run once before.

    `topology` is that of the towers' devices, for `hierarchical_copy`.
    `tower_tensors[t][i]` is tensor i of tower t. Collective: every rank of the group calls it in the same order, while
    it builds the graph. Raises as `TowerMgr.preprocess_device_grads`, and as `mgr.check_build`.
    """
    collectives.init()
    mgr.check_build(options)
    manager = mgr.VariableMgrLocalReplicated(replace(options, local_towers=len(tower_tensors)))
    manager.tower_average = mean
    manager.benchmark_cnn.network_topology = topology
    first = tower_tensors[0]
    places = [_Place(f"tensor{index}", one.shape, one.dtype) for index, one in enumerate(first)]
    towers_ = [[(tensor, place) for tensor, place in zip(tower, places, strict=True)] for tower in tower_tensors]
    _, state = manager.preprocess_device_grads(towers_)
    return [[tensor for tensor, _ in tower] for tower in state], manager._warmup_ops


def spec_of(alg: str, shards: int) -> str:
    """The spec of one range. Local."""
    return alg if shards == 1 else f"{alg}#{shards}"


def sum_gradients_all_reduce(
    single_session: bool,
    dev_prefixes: Sequence[str],
    tower_grads: Sequence[Sequence[tuple[Any, Any]]],
    num_workers: int,
    alg: str,
    num_shards: int,
    gpu_indices: Sequence[int],
    agg_small_grads_max_bytes: int = 0,
    agg_small_grads_max_group: int = 10,
    allreduce_merge_scope: int = 1,
) -> list[list[Any]]:
    """Pairs of summed gradient and variable, for each tower; small ones are packed by the rule of tf_cnn_benchmarks.

    Workers, sessions and device names are those of a gRPC cluster; here the workers are the ranks.
    Collective: every rank of the group calls it in the same order.
    """
    del single_session, dev_prefixes, num_workers, gpu_indices
    grads, packing = tower_grads, None
    if agg_small_grads_max_bytes > 0 and agg_small_grads_max_group > 0:
        grads, packing = smalltensors.pack_small_tensors(
            tower_grads, max_bytes=agg_small_grads_max_bytes, max_group=agg_small_grads_max_group
        )
    options = merge(Options(all_reduce_spec=spec_of(alg, num_shards), allreduce_merge_scope=allreduce_merge_scope))
    sums, _ = reduce_towers(options, [[gradient for gradient, _ in tower] for tower in grads])
    pairs = [
        [[total, variable] for total, (_, variable) in zip(tower, before, strict=True)]
        for tower, before in zip(sums, grads, strict=True)
    ]
    return smalltensors.unpack_small_tensors(pairs, packing)


class BatchAllReduceAlgorithm:
    """Sums lists of tensors over towers and ranks, in one of the ways below."""

    _network_topology: Any = None
    _use_mean = False

    def _options(self) -> Options:
        raise NotImplementedError

    def batch_all_reduce(
        self,
        all_device_tensors: Sequence[Sequence[Any]],
        num_splits: int | None,
        compact_tensors: bool,
        defer_tensors: bool,
        xla_compile: bool = False,
    ) -> tuple[list[list[Any]], list[Any]]:
        """The sums, in the form of `all_device_tensors`, and operations that run once before the first step.

        `num_splits`: all are joined and cut into so many; `compact_tensors`: float16 on the way; `defer_tensors`: the
        sums of the step before. What XLA would compile is compiled by TensorFlow as it likes.
        Collective: every rank of the group calls it in the same order.
        """
        del xla_compile
        options = replace(
            self._options(),
            gradient_repacking=num_splits or None,
            compact_gradient_transfer=compact_tensors,
            variable_consistency="relaxed" if defer_tensors else "strong",
        )
        return reduce_towers(merge(options), all_device_tensors, self._network_topology, self._use_mean)


class CopyToDeviceAlgorithm(BatchAllReduceAlgorithm):
    """Towers are summed (or averaged) on the devices given, in turn."""

    def __init__(self, devices_to_reduce_on: Sequence[str], use_mean: bool = False) -> None:
        self._devices = list(devices_to_reduce_on)
        self._use_mean = use_mean

    def _options(self) -> Options:
        on_gpu = any("gpu" in device.lower() for device in self._devices)
        return Options(local_parameter_device="gpu" if on_gpu else "cpu")


class HierarchicalCopyAlgorithm(BatchAllReduceAlgorithm):
    """Towers are summed in two halves, then between them."""

    def __init__(self, network_topology: Any) -> None:
        self._network_topology = network_topology

    def _options(self) -> Options:
        return Options(hierarchical_copy=True)


class AllReduceSpecAlgorithm(BatchAllReduceAlgorithm):
    """Ranks are summed by the algorithm of a spec, of one range."""

    def __init__(
        self,
        all_reduce_spec: str,
        gpu_indices: Sequence[int],
        agg_small_grads_max_bytes: int,
        agg_small_grads_max_group: int,
    ) -> None:
        del gpu_indices
        self._chosen = Options(
            all_reduce_spec=single_range(all_reduce_spec, "replicated"),
            agg_small_grads_max_bytes=agg_small_grads_max_bytes or None,
            agg_small_grads_max_group=agg_small_grads_max_group or None,
        )

    def _options(self) -> Options:
        return self._chosen


def algorithm_from_params(params: Any) -> BatchAllReduceAlgorithm:
    """The algorithm that the flags of tf_cnn_benchmarks name. Local."""
    if params.all_reduce_spec:
        small = (params.agg_small_grads_max_bytes, params.agg_small_grads_max_group)
        return AllReduceSpecAlgorithm(params.all_reduce_spec, [], *small)
    if params.hierarchical_copy:
        return HierarchicalCopyAlgorithm(params.network_topology)
    return CopyToDeviceAlgorithm([f"/{params.local_parameter_device}:0"])


def single_range(text: str, mode: str) -> str:
    """The spec, if it has one range. Local. Raises ValueError."""
    ranges = spec.parse(text)
    if len(ranges) > 1:
        raise ValueError(f"{mode}: all_reduce_spec={text!r} is hybrid; this mode takes one range without a limit")
    return text


def merge(options: Options) -> Options:
    """The options without those that others of them leave nothing to do for. Local.

    tf_cnn_benchmarks takes them together: what has been joined is not packed again, pieces are pieces, and an algorithm
    that is no plain all-reduce has no groups.
    """
    ranges = spec.parse(options.all_reduce_spec) if options.all_reduce_spec else ()
    if options.gradient_repacking:
        whole = spec.unparse([replace(part, shards=1) for part in ranges]) or None
        return replace(
            options,
            all_reduce_spec=whole,
            agg_small_grads_max_bytes=None,
            agg_small_grads_max_group=None,
            allreduce_merge_scope=None,
        )
    if not options.agg_small_grads_max_bytes:
        options = replace(options, agg_small_grads_max_group=None)
    grouped = all(part.shards == 1 and part.alg in ("xring", "nccl", "collective") for part in ranges)
    if (options.allreduce_merge_scope or 1) <= 1 or options.agg_small_grads_max_bytes or not grouped:
        options = replace(options, allreduce_merge_scope=None)
    return options
