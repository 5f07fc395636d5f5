"""The `hvdvars train` command and the README's example, as users start them."""

import json
import sys
from pathlib import Path

import launchers
import numpy as np
import pytest
from launchers import ROOT, Launch

COMMAND = (str(Path(sys.executable).with_name("hvdvars")), "train")
MODULE = (sys.executable, "-m", "hvdvars", "train")


def run(tmp_path, launch, *flags, command=COMMAND, code=0):
    """The output of the command; standard error and output together."""
    launchers.skip_without_launcher(launch)
    ended = launchers.run(launch, [*command, *flags], tmp_path / "output.txt", 180)
    assert ended.code == code, f"{ended.code}\n{ended.tail()}"
    return ended.output


@pytest.mark.parametrize(
    ("how", "ranks", "update"),
    [
        ("bare", 1, "horovod"),
        ("horovodrun", 2, "parameter_server --staged_vars"),
        ("gloo", 3, "distributed_replicated --copy_dtype float16"),
    ],
)
def test_it_learns_the_digits(tmp_path, how, ranks, update):
    folder, mode = tmp_path / "run", update.split()[0]
    flags = [
        "--variable_update",
        *update.split(),
        "--epochs",
        "4",
        "--learning_rate",
        "0.005",
        "--train_dir",
        str(folder),
    ]
    output = run(tmp_path, Launch(how, ranks), *flags)
    assert "replicas identical: yes" in output and f"{ranks} on 1 node" in output
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", *["epoch"] * 4, "end"]
    end = events[-1]
    assert end["test_accuracy"] > 0.85 and end["ranks"] == ranks and end["report"]["mode"] == mode
    # Every test sample once, however the ranks' shares come out.
    assert end["test_accuracy"] == end["test_correct"] / end["test_count"] and end["test_count"] in (359, 360)
    assert f"test accuracy: {end['test_accuracy']:.3f}" in output
    names = {path.name.partition(".")[0] for path in folder.iterdir()}
    assert names == {"metrics", "events", "curve", "checkpoint"}
    with np.load(folder / "checkpoint.npz") as file:
        assert any(name.startswith("slot/") for name in file.files)


def test_own_data_and_one_json_object(tmp_path):
    random = np.random.RandomState(0)
    labels = random.randint(0, 3, 101)
    x = (np.eye(3)[labels] @ random.randn(3, 5) + 0.1 * random.randn(101, 5)).astype("float32")
    np.savez(tmp_path / "own.npz", x_train=x[:70], y_train=labels[:70], x_test=x[70:], y_test=labels[70:])
    flags = ["--data", str(tmp_path / "own.npz"), "--model", "mlp", "--json", "--quiet", "--epochs", "12"]
    output = run(tmp_path, Launch("mpi", 2), *flags, "--batch_size", "8", command=MODULE)
    (line,) = [line for line in output.splitlines() if line.startswith("{")]
    summary = json.loads(line)
    assert summary["test_count"] == 31 and summary["test_accuracy"] > 0.9 and summary["replicas_identical"] is True


def test_a_diverged_run_is_no_success(tmp_path):
    flags = ["--model", "mlp", "--optimizer", "sgd", "--learning_rate", "1e30", "--train_dir", str(tmp_path / "run")]
    output = run(tmp_path, Launch("bare", 1), *flags, code=1)
    assert "diverged: the loss is no number after epoch 1" in output
    assert not (tmp_path / "run" / "checkpoint.npz").exists()


def test_wrong_flags_are_refused_once(tmp_path):
    output = run(tmp_path, Launch("mpi", 2), "--variable_update", "ring", code=2)
    assert output.count("hvdvars: error") == 1 and "parameter_server" in output


def test_the_example(tmp_path):
    program = [sys.executable, str(ROOT / "examples" / "quickstart.py")]
    ended = launchers.run(Launch("gloo", 2), program, tmp_path / "output.txt", 180)
    assert ended.code == 0, ended.tail()
    for rank in (0, 1):
        assert f"rank {rank} of 2: loss 0.0" in ended.output or f"rank {rank} of 2: loss 0.1" in ended.output


def test_the_example_of_a_graph(tmp_path):
    program = [sys.executable, str(ROOT / "examples" / "tower_graph.py")]
    ended = launchers.run(Launch("mpi", 2), program, tmp_path / "output.txt", 180)
    assert ended.code == 0, ended.tail()
    for rank in (0, 1):
        assert f"rank {rank} of 2: loss 0.0" in ended.output
    kernels = {line.partition("kernel ")[2] for line in ended.output.splitlines() if "kernel [" in line}
    assert len(kernels) == 1, ended.output
