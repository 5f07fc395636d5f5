"""Lets `benchmark_cnn` of a tf_cnn_benchmarks checkout train on all ranks of a launcher, without a gRPC cluster.

A rank is a worker. Rank 0 is the chief, which alone writes; every rank counts steps, keeps the loss scale and evaluates
alike, on its own share of the input.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvdvars import collectives, launchenv, meeting
from hvdvars.session import world

_CLUSTER = {"job_name": "", "ps_hosts": "", "worker_hosts": "", "controller_host": None, "task_index": 0}
_FILES = {"trace_file": "", "tfprof_file": None, "graph_file": None, "partitioned_graph_file_prefix": None}
_SEES_ALL_WORKERS = ("horovod", "collective_all_reduce")
"""Modes for which the checkout itself multiplies the examples of a step by the number of workers."""


def join(benchmark_cnn: Any) -> bool:
    """Make the module `benchmark_cnn` train on all ranks; whether it did. Call it once, before `benchmark_cnn.setup`.

    Without a launcher nothing is changed. Collective under one: every rank calls it first.
    """
    launcher = launchenv.detect()
    if launcher.size is None:
        return False
    collectives.init()
    benchmark_cnn.setup = _with_plain_params(benchmark_cnn.setup)
    benchmark_cnn.create_config_proto = _with_own_devices(benchmark_cnn.create_config_proto)
    benchmark_cnn.get_learning_rate = _with_all_examples(benchmark_cnn.get_learning_rate)
    benchmark_cnn.BenchmarkCNN = _joined(benchmark_cnn.BenchmarkCNN, benchmark_cnn.variable_mgr)
    if world().rank:
        _silence(benchmark_cnn.log_fn)
    return True


def _plain(params: Any) -> Any:
    """The parameters without a cluster."""
    return params._replace(**{name: value for name, value in _CLUSTER.items() if hasattr(params, name)})


def _silence(log_fn: Any) -> None:
    """Let every module that has this function say nothing: each has it by its name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("log_fn") is log_fn:
            module.log_fn = _say_nothing  # type: ignore[attr-defined]


def _say_nothing(*_: Any) -> None:
    """The log of the ranks that are not the chief."""


def _with_plain_params(setup: Any) -> Any:
    @functools.wraps(setup)
    def wrapped(params: Any) -> Any:
        return setup(_plain(params))

    return wrapped


def _with_own_devices(create_config_proto: Any) -> Any:
    @functools.wraps(create_config_proto)
    def wrapped(params: Any) -> Any:
        config = create_config_proto(params)
        # There is no job of workers whose devices could be picked or which could lead.
        del config.device_filters[:]
        config.experimental.collective_group_leader = ""
        if params.device == "gpu" and params.variable_update != "horovod":
            # A launcher may have left this process no GPUs but its own.
            shared = len(tf.config.list_physical_devices("GPU")) > params.num_gpus
            first = world().local_rank * params.num_gpus if shared else 0
            config.gpu_options.visible_device_list = ",".join(str(first + k) for k in range(params.num_gpus))
        return config

    return wrapped


def _with_all_examples(get_learning_rate: Any) -> Any:
    @functools.wraps(get_learning_rate)
    def wrapped(params: Any, global_step: Any, num_examples: int, model: Any, examples_per_step: int) -> Any:
        if params.variable_update not in _SEES_ALL_WORKERS:
            examples_per_step *= world().size
        return get_learning_rate(params, global_step, num_examples, model, examples_per_step)

    return wrapped


class _EveryRankSaves:
    """A saver that every rank calls: values come to rank 0, which writes."""

    def __init__(self, saver: Any, before: tf.Operation) -> None:
        self._saver, self._before = saver, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._saver, name)

    def save(self, session: Any, *arguments: Any, **more: Any) -> Any:
        """Write a checkpoint on rank 0. Collective: every rank of the group calls it in the same order."""
        session.run(self._before)
        return self._saver.save(session, *arguments, **more) if world().rank == 0 else None


class _SupervisorOfAll:
    """The supervisor of this rank, with a saver for all of them."""

    def __init__(self, supervisor: Any, saver: Any) -> None:
        self._supervisor, self.saver = supervisor, saver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._supervisor, name)


_Mixed: Any = object
"""Whatever `super()` finds: the checkout's class comes after."""


class _Worker(_Mixed):
    """What makes a BenchmarkCNN one worker of as many as there are ranks; to be put before the class itself."""

    managers: Any
    """The module that managers are taken from."""
    params: Any
    job_name: Any
    task_index: Any
    num_workers = property(lambda self: world().size, lambda self, value: None)
    """The number of ranks, whatever is assigned. Local."""
    single_session = property(lambda self: self._in_loop, lambda self, value: None)
    """Whether a step of all is one in this rank's count: in the loop. No rank builds another's graph."""
    _in_loop = False

    def __init__(self, params: Any, *arguments: Any, **more: Any) -> None:
        params = _plain(params)
        wanted = params.variable_update
        own = {"tf_random_seed": params.tf_random_seed + (world().rank if wanted != "horovod" else 0)}
        if world().rank:
            own |= {name: value for name, value in _FILES.items() if hasattr(params, name)}
            own["eval_dir"] = tempfile.mkdtemp(prefix="hvdvars-eval-")
        # Masters ask for a cluster; the rest of their set-up is that of parameter_server.
        first = "parameter_server" if wanted == "distributed_replicated" else wanted
        super().__init__(params._replace(variable_update=first, **own), *arguments, **more)
        if first != wanted:
            self.params = self.params._replace(variable_update=wanted)
            self.variable_mgr = self.managers.VariableMgrDistributedReplicated(self)
            self.devices = self.variable_mgr.get_devices()
        self._check_saving()
        self._count_all_examples()

    def _check_saving(self) -> None:
        if world().size > 1 and self.params.save_model_secs and getattr(self.variable_mgr, "partly", False):
            raise ValueError(
                f"save_model_secs={self.params.save_model_secs}: a timer of rank 0 cannot save what owners have, "
                f"in variable_update={self.params.variable_update}. Use save_model_steps."
            )

    def _count_all_examples(self) -> None:
        """Evaluate after so many epochs of all ranks."""
        every = self.params.eval_during_training_every_n_epochs
        epochs = self.params.eval_during_training_at_specified_epochs
        if every:
            count = math.ceil((self.num_epochs - every) / every)
            epochs = [every * (k + 1) for k in range(max(0, count))]
        if every or epochs:
            examples = self.dataset.num_examples_per_epoch("train")
            step = self.batch_size * world().size
            self.eval_during_training_at_specified_steps = {
                int(float(epoch) * examples + step - 1) // step for epoch in epochs
            }

    def get_input_preprocessor(self) -> Any:
        """The preprocessor of this rank's share. Local."""
        with self._as_worker():
            return super().get_input_preprocessor()

    @contextlib.contextmanager
    def _as_worker(self) -> Iterator[None]:
        before = self.job_name, self.task_index
        self.job_name, self.task_index = "worker", world().rank
        try:
            yield
        finally:
            self.job_name, self.task_index = before

    def _build_graph(self) -> Any:
        info = super()._build_graph()
        self._before_save = tf.group(*self.variable_mgr.get_pre_save_ops(), name="hvdvars_before_save")
        return info

    def _benchmark_graph(self, graph_info: Any, eval_graph_info: Any) -> Any:
        kept = self.params
        if world().rank:
            self.params = kept._replace(train_dir=None)
        self._kept = kept
        try:
            return super()._benchmark_graph(graph_info, eval_graph_info)
        finally:
            self.params = kept

    def benchmark_with_session(self, sess: Any, supervisor: Any, *arguments: Any) -> Any:
        """Train. Collective: every rank runs it, and takes part in saving."""
        saver = supervisor.saver and _EveryRankSaves(supervisor.saver, self._before_save)
        hidden, self.params = self.params, self._kept
        self._in_loop = True
        try:
            return super().benchmark_with_session(sess, _SupervisorOfAll(supervisor, saver), *arguments)
        finally:
            self.params = hidden
            self._in_loop = False

    def _eval_once(self, *arguments: Any) -> Any:
        found = super()._eval_once(*arguments)
        ranks = meeting.gather_objects([float(one) for one in found], "accuracy")
        means = tuple(sum(values) / len(values) for values in zip(*ranks, strict=True))
        if world().rank == 0 and world().size > 1:
            print(f"Accuracy of {world().size} ranks @ 1 = {means[0]:.4f} Accuracy @ 5 = {means[1]:.4f}", flush=True)
        return means


def _joined(base: Any, managers: Any) -> Any:
    """`base`, a BenchmarkCNN, as one that every rank runs with the others."""
    return type("BenchmarkCNN", (_Worker, base), {"managers": managers})
