"""A run whose parts have different numbers of ranks and different modes ends where one process does."""

import sys
from pathlib import Path

import launchers
import numpy as np
from launchers import Launch

PROGRAM = Path(__file__).with_name("checkpoint_program.py")


def part(file, launch, mode, placement, first, last):
    program = [sys.executable, str(PROGRAM), str(file), mode, placement, str(first), str(last)]
    ended = launchers.run(launch, program, file.with_suffix(".log"), 120)
    assert ended.code == 0, ended.tail()


def test_the_number_of_ranks_may_change(tmp_path):
    whole, parts = tmp_path / "whole.npz", tmp_path / "parts.npz"
    part(whole, Launch("bare", 1), "horovod", "-", 0, 8)
    part(parts, Launch("mpi", 2), "parameter_server", "elements", 0, 2)
    part(parts, Launch("mpi", 3), "horovod", "-", 2, 4)
    part(parts, Launch("gloo", 2), "parameter_server", "variables", 4, 6)
    part(parts, Launch("bare", 1), "parameter_server", "elements", 6, 8)
    with np.load(whole) as one, np.load(parts) as two:
        assert one.files == two.files
        for key in one.files[1:]:
            np.testing.assert_allclose(two[key], one[key], 1e-4, 1e-6, err_msg=key)
