"""Programs that have turned TensorFlow 2's behaviour off train, save, and are told what belongs elsewhere."""

import json
import sys
from pathlib import Path

import launchers
import pytest
from launchers import Launch

PROGRAM = Path(__file__).with_name("tf1_program.py")


@pytest.mark.parametrize(
    ("how", "mode", "factor"), [("mpi", "distributed_replicated", 1.0), ("gloo", "replicated", 4.0)]
)
def test_two_ranks_of_two_towers(tmp_path, how, mode, factor):
    program = [sys.executable, str(PROGRAM), mode, "{}", str(tmp_path)]
    ended = launchers.run(Launch(how, 2), program, tmp_path / "output.txt", 120)
    assert ended.code == 0, ended.tail()
    found = json.loads((tmp_path / "found.json").read_text())
    # Rank 0's first value, and four steps of the gradients 1, 2, 3 and 4.
    assert found["weights"] == [[1.0 - 4 * 0.125 * 2.5 * factor] * 3] * 2
    names = ["moving", "table", "table/Momentum", "weight", "weight/Momentum"]
    assert found["names"] == names
    parts = ["preprocess_device_grads", "get_post_init_ops", "graph of TensorFlow 1", "get_pre_save_ops", "outside of"]
    for part, message in zip(parts, found["refusals"], strict=True):
        assert part in message
