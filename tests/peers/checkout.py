"""A checkout of tf_cnn_benchmarks, untouched and with our managers in the place of its own.

`HVDVARS_TF_CNN_BENCHMARKS` names its folder `scripts/tf_cnn_benchmarks`; without it these tests are skipped. Nothing of
the checkout is in this repository, and the folder itself is left as it is.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

VARIABLE = "HVDVARS_TF_CNN_BENCHMARKS"

# The one place that has them: docs/tf_cnn_benchmarks.md shows these lines, and tests/unit/test_docs.py compares.
CHANGES = r"""
rm variable_mgr.py variable_mgr_util.py allreduce.py batch_allreduce.py
sed -i -E 's/^import (variable_mgr|variable_mgr_util|allreduce)$/from hvdvars import tf_cnn_benchmarks as \1/' *.py
sed -i 's/^    params = benchmark_cnn.setup/    benchmark_cnn.variable_mgr.join(benchmark_cnn)\n&/' tf_cnn_benchmarks.py
""".strip()


def missing() -> str | None:
    """Why these tests cannot run here, or None."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return f"set {VARIABLE} to scripts/tf_cnn_benchmarks of a checkout of github.com/tensorflow/benchmarks"
    if not (Path(folder) / "benchmark_cnn.py").is_file():
        return f"{VARIABLE}={folder} has no benchmark_cnn.py"
    if importlib.util.find_spec("tf_keras") is None:
        return "tf_cnn_benchmarks needs the layers of Keras 2: install tf_keras of TensorFlow's version"
    return None


NEEDED = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def copy(folder: Path) -> Path:
    """A copy of the checkout as it is, in `folder`."""
    return Path(shutil.copytree(os.environ[VARIABLE], folder, ignore=shutil.ignore_patterns("__pycache__")))


def change(folder: Path) -> Path:
    """Put our managers into the copy in `folder`, with the lines of the docs."""
    subprocess.run(["bash", "-e", "-c", CHANGES], cwd=folder, check=True)
    main = (folder / "tf_cnn_benchmarks.py").read_text()
    assert main.count("variable_mgr.join(benchmark_cnn)") == 1, "the place for join is not what it was"
    return folder
