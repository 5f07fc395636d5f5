"""A run whose parts have different numbers of ranks and different modes ends where one process does."""

import json
import shutil
import sys
from pathlib import Path

import launchers
import numpy as np
from launchers import Launch

PROGRAM = Path(__file__).with_name("checkpoint_program.py")


def part(file, launch, mode, first, last, **options):
    program = [sys.executable, str(PROGRAM), str(file), mode, json.dumps(options), str(first), str(last)]
    ended = launchers.run(launch, program, file.with_suffix(".log"), 120)
    assert ended.code == 0, ended.tail()


def test_the_number_of_ranks_may_change(tmp_path):
    whole, parts = tmp_path / "whole.npz", tmp_path / "parts.npz"
    part(whole, Launch("bare", 1), "horovod", 0, 7)
    part(parts, Launch("mpi", 2), "parameter_server", 0, 2, placement="elements")
    part(parts, Launch("mpi", 3), "horovod", 2, 4)
    part(parts, Launch("gloo", 2), "distributed_replicated", 4, 6)
    # The first step after a restore reads the newest values, as all steps of the others do.
    part(parts, Launch("bare", 1), "parameter_server", 6, 7, staged_vars=True, placement="elements")
    with np.load(whole) as one, np.load(parts) as two:
        assert one.files == two.files
        for key in one.files[1:]:
            np.testing.assert_allclose(two[key], one[key], 1e-4, 1e-6, err_msg=key)


def test_masters_keep_their_digits(tmp_path):
    file, before = tmp_path / "run.npz", tmp_path / "before.npz"
    part(file, Launch("mpi", 2), "distributed_replicated", 0, 3, copy_dtype="float16")
    shutil.copy(file, before)
    part(file, Launch("bare", 1), "distributed_replicated", 3, 3, copy_dtype="float16")
    with np.load(before) as one, np.load(file) as two:
        assert one.files == two.files
        for key in one.files[1:]:
            np.testing.assert_array_equal(two[key], one[key], key)
        for index in range(3):
            master, copy = two[f"master/{index}"], two[f"variable/{index}"]
            assert (copy == master.astype("float16").astype("float32")).all() and (copy != master).any()
