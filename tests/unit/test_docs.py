"""What the docs say is what the code does."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_modes_and_options_is_the_one_that_the_code_refuses_by():
    command = [sys.executable, str(ROOT / "scripts" / "mode_table.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.strip() in (ROOT / "docs" / "modes.md").read_text()


def test_the_example_in_the_readme_is_the_one_that_is_tested():
    readme = (ROOT / "README.md").read_text()
    assert (ROOT / "examples" / "quickstart.py").read_text().strip() in readme


def test_the_example_of_a_graph_is_the_one_that_is_tested():
    docs = (ROOT / "docs" / "tf_cnn_benchmarks.md").read_text()
    assert (ROOT / "examples" / "tower_graph.py").read_text().strip() in docs


def test_the_change_to_a_checkout_is_the_one_that_is_tested():
    program = ast.parse((ROOT / "tests" / "peers" / "checkout.py").read_text())
    assigned = {one.targets[0].id: one.value for one in program.body if isinstance(one, ast.Assign)}
    changes = next(one.value for one in ast.walk(assigned["CHANGES"]) if isinstance(one, ast.Constant))
    docs = (ROOT / "docs" / "tf_cnn_benchmarks.md").read_text()
    assert f"\n```\n{changes.strip()}\n```\n" in docs
