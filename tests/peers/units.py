"""Runs tests of a checkout's own, each in a process of its own: units.py CHECKOUT FOLDER.

`FOLDER/tests.txt` names them: `module:Class.test`. What came of each is a line of `FOLDER/results.jsonl`. They run on
CPUs: without the checks for a GPU, and, but for the tests of device names, with parameters for a CPU and with resource
variables.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import unittest
from pathlib import Path
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"
sys.path.insert(0, sys.argv[1])

import benchmark_cnn  # noqa: E402  (of the checkout)
import tensorflow.compat.v1 as tf  # noqa: E402
import test_util  # noqa: E402  (of the checkout)
from absl import flags  # noqa: E402

LIMIT = 180
"""Seconds for one test."""


def main(checkout: Path, folder: Path) -> None:
    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    os.chdir(checkout)
    wanted = (folder / "tests.txt").read_text().split()
    modules = {name: importlib.import_module(name) for name in sorted({one.partition(":")[0] for one in wanted})}
    os.environ["TEST_OUTPUTS_DIR"] = str(folder)
    given = [f"--test_tmpdir={folder / 'tmp'}"] if "test_tmpdir" in flags.FLAGS else []
    flags.FLAGS(["units", *given])
    (folder / "tmp").mkdir()
    with (folder / "results.jsonl").open("w", buffering=1) as results:
        for one in wanted:
            module, _, name = one.partition(":")
            started = time.perf_counter()
            problem = apart(lambda module=module, name=name: attempt(modules[module], name), folder / "problem.txt")
            row = {"name": one, "problem": problem, "seconds": round(time.perf_counter() - started, 2)}
            results.write(json.dumps(row) + "\n")


def apart(function: Any, path: Path) -> str | None:
    """Call a function in a fork of this process; the text that it gave, or how it ended."""
    path.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            path.write_text(function() or "")
        finally:
            os._exit(0)
    end = time.monotonic() + LIMIT
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return f"ended after {LIMIT} s"
        time.sleep(0.05)
    if not path.exists():
        return "the process ended without a result"
    return path.read_text() or None


def attempt(module: Any, name: str) -> str | None:
    """Run one test; what went wrong."""
    if hasattr(module, "_check_has_gpu"):
        module._check_has_gpu = lambda: None
    if "Model." not in name:
        _ask_for_cpus()
    suite = unittest.defaultTestLoader.loadTestsFromName(name, module)
    result = unittest.TestResult()
    suite.run(result)
    wrong = [text for _, text in result.errors + result.failures + result.skipped]
    return "\n".join(wrong) or (None if result.testsRun == 1 else f"{result.testsRun} tests ran")


def _ask_for_cpus() -> None:
    make = benchmark_cnn.make_params
    defaults = {"device": "cpu", "data_format": "NHWC", "use_resource_vars": True}
    benchmark_cnn.make_params = lambda **given: make(**{**defaults, **given})
    first = test_util.TestCNNModel.__init__

    def with_format(self: Any) -> None:
        first(self)
        self.data_format = "NHWC"

    test_util.TestCNNModel.__init__ = with_format


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
