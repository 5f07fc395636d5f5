"""Runs benchmarks of a checkout, one after the other, each run in a graph of its own; writes what they did.

    worker.py CHECKOUT FOLDER

`FOLDER/configurations.json` has a list of {"name", "runs"}. A run has "params" for make_params (in which "{folder}" is
a folder of the configuration), "images" (numbers) and the name of a "model"; it may "read" variables before every
step, and may have to "refuse": its error is noted. Every rank writes `rank<r>.jsonl`: a line when a configuration
begins and one when it ends, with what `Notes` has of each of its runs. Started by a launcher, the ranks train
together, if the checkout has our managers.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"
sys.path.insert(0, sys.argv[1])

import benchmark_cnn  # noqa: E402  (of the checkout)
import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402
import test_util  # noqa: E402  (of the checkout)

DEFAULTS = {
    "batch_size": 2, "num_gpus": 1, "display_every": 1, "num_warmup_batches": 0, "num_batches": 5, "optimizer": "sgd",
    "weight_decay": 2**-4, "init_learning_rate": 2**-6, "model": "test_model", "device": "cpu", "data_format": "NHWC",
    "local_parameter_device": "cpu", "use_resource_vars": True,
}  # fmt: skip
"""Of a run. Variables that are references race with their readers on a CPU."""

LIMIT = 120
"""Seconds for one configuration."""


class Wide(test_util.TestCNNModel):
    """More variables, of different sizes, with values that differ in all their elements."""

    def add_inference(self, cnn: Any) -> None:
        # Without the last tanh, a gradient would not depend on the loss, and the update would race with its variables.
        for number, depth in enumerate([5, 3, 4, 1]):
            start = {"use_batch_norm": None, "bias": 0.1, "kernel_initializer": _ramp(number + 1)}
            with tf.name_scope(f"layer{number}"):
                cnn.conv(depth, 1, 1, 1, 1, activation="tanh", **start)
        cnn.reshape([-1, 1])


def _ramp(steepness: int) -> Any:
    """An initializer with values that differ."""
    values = np.linspace(0.01, 0.09, 25) * steepness
    return lambda shape, dtype=None, partition_info=None: tf.constant(np.resize(values, shape), dtype)


class Normalized(test_util.TestCNNModel):
    """With moving statistics, which are saved and not trained."""

    def add_inference(self, cnn: Any) -> None:
        cnn.conv(1, 1, 1, 1, 1, use_batch_norm=True, activation=None, bias=None)
        super().add_inference(cnn)


MODELS = {"test": test_util.TestCNNModel, "wide": Wide, "normalized": Normalized}


class Notes:
    """What a run did."""

    def __init__(self, read: list[str]) -> None:
        self.read = read
        self.losses: list[float] = []
        """One a step."""
        self.values: list[dict[str, float]] = []
        """Of the variables to read, before each step."""
        self.weights: list[dict[str, Any]] = []
        """One a tower, at the end."""
        self.accuracies: list[tuple[float, float]] = []
        """One an evaluation."""
        self.stats: dict[str, Any] = {}
        self.said: list[str] = []
        """What the benchmark gave to its log, whether or not this rank shows it."""
        self.refused = ""


def train(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run of the benchmark. The keys of what it gives are those of `Notes`."""
    notes = Notes(run.get("read", []))
    one_step, say = benchmark_cnn.benchmark_one_step, benchmark_cnn.log_fn
    benchmark_cnn.benchmark_one_step = _noting_losses(one_step, notes)
    benchmark_cnn.log_fn = lambda text: (notes.said.append(text), say(text))
    try:
        notes.stats = _run_benchmark(run, notes, folder)
    except Exception as error:
        if not run.get("refuse"):
            raise
        notes.refused = f"{type(error).__name__}: {error}"
    finally:
        benchmark_cnn.benchmark_one_step, benchmark_cnn.log_fn = one_step, say
    return {name: value for name, value in vars(notes).items() if name != "read"}


def _run_benchmark(run: dict[str, Any], notes: Notes, folder: Path) -> dict[str, float]:
    given = {name: _in_folder(value, folder) for name, value in run["params"].items()}
    params = benchmark_cnn.setup(benchmark_cnn.make_params(**{**DEFAULTS, **given}))
    model = MODELS[run.get("model", "test")]()
    model.data_format = "NHWC"
    if params.use_fp16:
        model.data_type, model.fp16_vars = tf.float16, params.fp16_vars
    benchmark = _noting_the_rest(notes)(params, dataset=test_util.TestDataSet(), model=model)
    _feed(benchmark, run["images"])
    with tf.Graph().as_default():
        return {name: float(value) for name, value in (benchmark.run() or {}).items()}


def _in_folder(value: Any, folder: Path) -> Any:
    return value.replace("{folder}", str(folder)) if isinstance(value, str) else value


def _feed(benchmark: Any, numbers: list[float]) -> None:
    images = 127.5 * (np.reshape(numbers, (-1, 1, 1, 1)) + 1.0)  # as the benchmark will scale them back
    for preprocessor in (benchmark.input_preprocessor, benchmark.eval_input_preprocessor):
        if preprocessor is not None:
            preprocessor.set_fake_data(images, np.ones(len(images)))


def _noting_losses(one_step: Any, notes: Notes) -> Any:
    def wrapped(session: Any, *arguments: Any, **more: Any) -> Any:
        if notes.read:
            variables = session.graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
            chosen = {one.op.name: one for one in variables if one.op.name in notes.read}
            notes.values.append({name: float(value) for name, value in session.run(chosen).items()})
        found = one_step(session, *arguments, **more)
        notes.losses.append(float(found[1]))
        return found

    return wrapped


def _noting_the_rest(notes: Notes) -> Any:
    class Benchmark(benchmark_cnn.BenchmarkCNN):  # type: ignore[misc, name-defined]
        def benchmark_with_session(self, session: Any, *arguments: Any) -> Any:
            found = super().benchmark_with_session(session, *arguments)
            for tower in range(self.num_gpus):
                variables = self.variable_mgr.trainable_variables_on_device(tower, tower, writable=True)
                values = session.run({_plain_name(one): one for one in variables})
                notes.weights.append({name: np.asarray(value, float).tolist() for name, value in values.items()})
            return found

        def _eval_once(self, *arguments: Any) -> Any:
            found = super()._eval_once(*arguments)
            notes.accuracies.append(tuple(map(float, found)))
            return found

    return Benchmark


def _plain_name(variable: Any) -> str:
    return str(variable.name).partition(":")[0].partition("/")[2]


def main(folder: Path) -> None:
    tf.disable_v2_behavior()
    configurations = json.loads((folder / "configurations.json").read_text())
    rank, meet = 0, lambda name, passed: True
    watch(LIMIT)
    if hasattr(benchmark_cnn.variable_mgr, "join") and benchmark_cnn.variable_mgr.join(benchmark_cnn):
        from hvdvars import session

        rank, meet = session.rank(), _meet
    with (folder / f"rank{rank}.jsonl").open("w", buffering=1) as results:
        for number, one in enumerate(configurations):
            results.write(json.dumps({"begins": one["name"]}) + "\n")
            result = attempt(one, folder / one["name"])
            results.write(json.dumps(result) + "\n")
            if not meet(one["name"], result["error"] is None):
                _start_again(number)
        watch(60)
        results.write(json.dumps({"done": True}) + "\n")


def attempt(one: dict[str, Any], folder: Path) -> dict[str, Any]:
    """All runs of one configuration, under the watchdog, until one fails."""
    watch(LIMIT)
    started, runs, error = time.perf_counter(), [], None
    try:
        for run in one["runs"]:
            runs.append(train(run, folder))
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}\n{traceback.format_exc()}"
    return {"name": one["name"], "runs": runs, "error": error, "seconds": round(time.perf_counter() - started, 2)}


def watch(limit: int) -> None:
    """Print all stacks after `limit` seconds and end the process soon after, unless called again before."""
    faulthandler.dump_traceback_later(limit)
    signal.alarm(limit + 5)


def _meet(name: str, passed: bool) -> bool:
    """Meet all ranks after a configuration; whether it passed on all of them."""
    from hvdvars import meeting

    watch(LIMIT)
    ranks = meeting.gather_objects([name, passed], "peers")
    if any(other != name for other, _ in ranks):
        raise RuntimeError(f"the ranks ran different configurations: {ranks}")
    return all(passed for _, passed in ranks)


def _start_again(number: int) -> None:
    """Bring what counts along with the ranks in line, where one of them failed."""
    manager = sys.modules.get("hvdvars.manager")
    if manager is not None:
        manager._numbers = itertools.count(1000 * (number + 1))


if __name__ == "__main__":
    main(Path(sys.argv[2]))
