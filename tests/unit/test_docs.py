"""What the docs say is what the code does."""

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
