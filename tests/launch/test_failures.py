"""A rank that raises, exits or is killed ends the whole job within seconds, not with 0, the first error on top."""

import sys
from pathlib import Path

import launchers
import pytest
from launchers import Launch

PROGRAM = Path(__file__).with_name("failing_program.py")
SECONDS = 15
FAILURES = [(how, 1, way) for how in ("mpi", "horovodrun", "gloo") for way in ("raise", "exit", "kill")]


@pytest.mark.parametrize(("how", "culprit", "way"), [*FAILURES, ("mpi", 0, "raise")])
def test_one_rank_ends_the_job(tmp_path, how, culprit, way):
    launchers.skip_without_launcher(Launch(how, 2))
    program = [sys.executable, str(PROGRAM), str(tmp_path), way, str(culprit)]
    ended = launchers.run(Launch(how, 2), program, tmp_path / "output.txt", 90)
    assert (tmp_path / "failed.txt").exists(), f"no rank came to the failure\n{ended.tail()}"
    late = ended.at - float((tmp_path / "failed.txt").read_text())
    assert ended.code, f"ended with {ended.code} after {late:.1f} s\n{ended.tail()}"
    assert late <= SECONDS, f"ended {late:.1f} s after the failure\n{ended.tail()}"
    assert "nobody noticed" not in ended.output
    if way == "raise":
        first = ended.output.find("ValueError: the first error, on purpose")
        assert first >= 0, ended.tail()
        begin = ended.output.find("Traceback (most recent call last)")
        assert begin < first and "Error:" not in ended.output[begin:first].replace("ValueError:", ""), ended.tail()
        assert f"[rank {culprit}/2]" in ended.output, ended.tail()
