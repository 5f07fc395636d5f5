"""What a checkout does besides training steps, on several ranks: loss scales, evaluation, checkpoints, the program."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkout
import launchers
import numpy as np
import peers
import pytest
from launchers import ROOT, Launch
from peers import Configuration

pytestmark = checkout.NEEDED

NUMBERS = [float(number) for number in range(-1, 15)]
TWOS = [2.0] * 16
Ranks = list[list[dict[str, Any]]]
"""For each rank, what its runs did."""

MODES: dict[str, dict[str, Any]] = {
    "horovod": {"variable_update": "horovod"},
    "parameter_server": {"variable_update": "parameter_server"},
    "replicated": {"variable_update": "replicated"},
    "relaxed": {"variable_update": "replicated", "variable_consistency": "relaxed"},
    "distributed_all_reduce": {"variable_update": "distributed_all_reduce", "all_reduce_spec": "pscpu:2k:xring"},
    "collective_all_reduce": {"variable_update": "collective_all_reduce", "all_reduce_spec": "collective"},
    "distributed_replicated": {"variable_update": "distributed_replicated"},
}
OWNERS = ("parameter_server", "distributed_replicated")


@dataclass(frozen=True)
class Feature:
    """Runs, and what has to be true of what they did on all ranks; `folder` is that of their files."""

    name: str
    ranks: int
    runs: tuple[dict[str, Any], ...] = field(hash=False)
    check: Callable[[Ranks, Path], None]

    def __str__(self) -> str:
        return f"{self.name}-{self.ranks}"

    def configuration(self) -> Configuration:
        """For `worker.py`."""
        return Configuration(str(self), Launch("mpi", self.ranks), self.runs)


def of(images: list[float] = NUMBERS, model: str = "test", read: tuple[str, ...] = (), **params: Any) -> dict[str, Any]:
    """A run."""
    return {"params": params, "images": images, "model": model, "read": list(read)}


def close(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance / 10)


def same_weights(*runs: dict[str, Any]) -> None:
    """All towers of all these runs have the same weights."""
    first, *others = [tower for run in runs for tower in run["weights"]]
    for other in others:
        assert sorted(other) == sorted(first)
        for name, value in first.items():
            close(other[name], value)


def product(run: dict[str, Any]) -> float:
    """A·B of the test model, by which it multiplies its input."""
    return float(np.prod([np.ravel(value)[0] for value in run["weights"][0].values()]))


# --- loss scales -----------------------------------------------------------------------------------------------------

SCALE, COUNT = "loss_scale", "loss_scale_normal_steps"


def scaled(mode: str, scale: float, images: list[float], towers: int = 1) -> dict[str, Any]:
    params = {"use_fp16": True, "fp16_enable_auto_loss_scale": True, "fp16_loss_scale": scale, "num_gpus": towers}
    return of(images, read=(SCALE, COUNT), fp16_inc_loss_scale_every_n=2, **params, **MODES[mode])


def scales(run: dict[str, Any]) -> list[float]:
    return [values[SCALE] for values in run["values"]]


def doubles_after_normal_steps(ranks: Ranks, folder: Path) -> None:
    for (run,) in ranks:
        # The step after two normal ones doubles it.
        assert scales(run) == [8, 8, 8, 16, 16]
        assert [values[COUNT] for values in run["values"]] == [0, 1, 2, 0, 1]
    same_weights(*[run for (run,) in ranks])


def halves_and_skips(ranks: Ranks, folder: Path) -> None:
    for (run,) in ranks:
        assert scales(run) == [2.0**30 / 2**step for step in range(5)]
        for tower in run["weights"]:
            assert sorted(np.ravel(list(tower.values()))) == [1.0, 2.0]


def halves_where_one_rank_overflows(ranks: Ranks, folder: Path) -> None:
    for (run,) in ranks:
        # The larger half of the input is another rank's at every step.
        assert scales(run)[:3] == [2.0**15, 2.0**14, 2.0**13]
    same_weights(*[run for (run,) in ranks])


def loss_scale_features() -> list[Feature]:
    found = []
    one_sided = [0.01] * 8 + [9.0] * 8
    for ranks, towers in [(2, 1), (2, 2), (4, 1)]:
        for mode in ("parameter_server", "replicated"):
            name = f"{mode}-{towers}"
            small = scaled(mode, 8.0, [0.5] * 16, towers)
            found.append(Feature(f"scale_doubles-{name}", ranks, (small,), doubles_after_normal_steps))
            found.append(
                Feature(f"scale_halves-{name}", ranks, (scaled(mode, 2.0**30, [0.5] * 16, towers),), halves_and_skips)
            )
        if towers == 1:
            runs = (scaled("parameter_server", 2.0**15, one_sided),)
            found.append(Feature("one_overflows-parameter_server", ranks, runs, halves_where_one_rank_overflows))
            runs = (scaled("replicated", 2.0**15, one_sided),)
            found.append(Feature("one_overflows-replicated", ranks, runs, halves_where_one_rank_overflows))
    return found


# --- evaluation ------------------------------------------------------------------------------------------------------


def evaluation_leaves_training_alone(ranks: Ranks, folder: Path) -> None:
    for plain, evaluated in ranks:
        assert len(evaluated["accuracies"]) == 3  # after 2 and 4 steps, and at the end
        close(evaluated["losses"], plain["losses"])
        same_weights(evaluated, plain)
        close(evaluated["stats"]["top_1_accuracy"], 2.0 * product(evaluated))
        assert evaluated["accuracies"] == ranks[0][1]["accuracies"]


def accuracies_are_averaged(ranks: Ranks, folder: Path) -> None:
    for (run,) in ranks:
        ((accuracy, _),) = run["accuracies"]
        # Rank 0 evaluates on ones, rank 1 on threes.
        close(accuracy, 2.0 * product(run))


def all_stop_together(ranks: Ranks, folder: Path) -> None:
    for (run,) in ranks:
        assert len(run["losses"]) == 2 and len(run["accuracies"]) == 1


def a_checkpoint_is_evaluated(ranks: Ranks, folder: Path) -> None:
    for trained, evaluated in ranks:
        ((accuracy, _),) = evaluated["accuracies"]
        close(accuracy, 2.0 * product(trained))
    files = sorted(path.name.partition(".")[0] for path in (folder / "evaluated").iterdir())
    assert files == ["events"], files


def evaluation_features() -> list[Feature]:
    found = []
    every = {"eval_during_training_every_n_steps": 2, "num_eval_batches": 2}
    for name, mode in MODES.items():
        runs = (of(TWOS, **mode), of(TWOS, **mode, **every))
        found.append(Feature(f"evaluates_between-{name}", 2, runs, evaluation_leaves_training_alone))
        train_dir = {"train_dir": "{folder}/trained"}
        evaluate = {"eval": True, "eval_dir": "{folder}/evaluated", **train_dir}
        runs = (of(TWOS, **mode, **train_dir), of(TWOS, **mode, **evaluate))
        found.append(Feature(f"evaluates_a_checkpoint-{name}", 2, runs, a_checkpoint_is_evaluated))
    averaged = {"eval_during_training_every_n_steps": 9, "num_eval_batches": 1, "num_batches": 1}
    found.append(
        Feature("averages", 2, (of([1.0] * 8 + [3.0] * 8, **MODES["replicated"], **averaged),), accuracies_are_averaged)
    )
    stop = {**every, "stop_at_top_1_accuracy": 0.1}
    for name in ("parameter_server", "replicated"):
        found.append(Feature(f"stops-{name}", 2, (of(TWOS, **MODES[name], **stop),), all_stop_together))
    return found


# --- checkpoints -----------------------------------------------------------------------------------------------------


def alternating(ranks: int) -> list[float]:
    """Every rank has two batches in turn, and begins with the same one after each start."""
    return [-1.0, 1.0, 2.0, 3.0] * (3 * ranks // 2)


def training_goes_on(ranks: Ranks, folder: Path) -> None:
    for whole, first, second in ranks:
        assert len(first["losses"]) == len(second["losses"]) == 2
        close(first["losses"] + second["losses"], whole["losses"])
        same_weights(whole, second)


def the_saved_weights_are_the_first(ranks: Ranks, folder: Path) -> None:
    for first, second in ranks:
        close(second["losses"][0], 2.0 * product(ranks[0][0]))
        assert len(first["losses"]) == len(second["losses"]) == 2


def saved_every_two_steps(ranks: Ranks, folder: Path) -> None:
    saved = {path.stem for path in (folder / "saved").glob("*.index")}
    assert saved == {"model.ckpt-2", "model.ckpt-4"}, saved


def a_timer_is_refused(ranks: Ranks, folder: Path) -> None:
    for (run,) in ranks:
        assert run["refused"].startswith("ValueError: save_model_secs=60") and "save_model_steps" in run["refused"]


def in_parts(ranks: int, one: dict[str, Any], other: dict[str, Any], model: str = "test", **more: Any) -> tuple:
    """Four steps of the first mode; and two of it, then two more of the other from the checkpoint."""
    images = alternating(ranks)
    parts = {"train_dir": "{folder}/parts", **more}
    whole = of(images, model, num_batches=4, **one, **more)
    return whole, of(images, model, num_batches=2, **one, **parts), of(images, model, num_batches=4, **other, **parts)


def checkpoint_features() -> list[Feature]:
    found = []

    def add(name: str, ranks: int, *modes: str, **more: Any) -> None:
        runs = in_parts(ranks, *(MODES[mode] for mode in modes), **more)
        found.append(Feature(name, ranks, runs, training_goes_on))

    for mode in MODES:
        if mode != "relaxed":  # the gradients that wait are not saved
            add(f"resumes-{mode}", 2, mode, mode, optimizer="momentum")
            add(f"resumes_towers-{mode}", 2, mode, mode, optimizer="momentum", num_gpus=1 + (mode != "horovod"))
    for mode in ("parameter_server", "distributed_replicated", "replicated"):
        add(f"resumes_adam-{mode}", 4, mode, mode, model="wide", optimizer="adam")
        add(f"resumes_rmsprop-{mode}", 2, mode, mode, model="wide", optimizer="rmsprop")
        add(f"resumes_statistics-{mode}", 2, mode, mode, model="normalized", optimizer="momentum")
    sums = ["horovod", "replicated", "distributed_all_reduce", "collective_all_reduce", "horovod"]
    means = ["parameter_server", "distributed_replicated", "parameter_server"]
    for group in (sums, means):
        for one, other in zip(group, group[1:], strict=False):
            add(f"moves-{one}-to-{other}", 2, one, other, model="wide", optimizer="momentum")
    for one, other in [("parameter_server", "replicated"), ("replicated", "parameter_server")]:
        runs = tuple(
            of(
                TWOS,
                num_batches=count,
                train_dir="{folder}/moved",
                optimizer="momentum",
                weight_decay=0.0,
                **MODES[mode],
            )
            for mode, count in [(one, 2), (other, 4)]
        )
        found.append(Feature(f"moves-{one}-to-{other}", 2, runs, the_saved_weights_are_the_first))
    staged = {"variable_update": "parameter_server", "staged_vars": True, "train_dir": "{folder}/staged"}
    runs = tuple(of(TWOS, num_batches=count, optimizer="momentum", weight_decay=0.0, **staged) for count in (2, 4))
    found.append(Feature("resumes-staged", 2, runs, the_saved_weights_are_the_first))
    for mode in ("parameter_server", "distributed_replicated", "replicated", "horovod"):
        often = {"num_batches": 4, "save_model_steps": 2, "train_dir": "{folder}/saved", "optimizer": "momentum"}
        found.append(Feature(f"saves_often-{mode}", 2, (of(**often, **MODES[mode]),), saved_every_two_steps))
    for mode in OWNERS:
        refused = {**of(save_model_secs=60, train_dir="{folder}/refused", **MODES[mode]), "refuse": True}
        found.append(Feature(f"refuses_a_timer-{mode}", 2, (refused,), a_timer_is_refused))
    return found


# --- the rest --------------------------------------------------------------------------------------------------------


def nothing_is_trained(ranks: Ranks, folder: Path) -> None:
    for (run,) in ranks:
        assert run["losses"] == [0.0] * 5
        for tower in run["weights"]:
            assert sorted(np.ravel(list(tower.values()))) == [1.0, 2.0]


def restored_weights_stay(ranks: Ranks, folder: Path) -> None:
    for trained, forward in ranks:
        assert forward["losses"] == [0.0] * 2
        same_weights(*[run[0] for run in ranks], forward)
        assert product(trained) != 2.0


def examples_of_all_ranks_count(ranks: Ranks, folder: Path) -> None:
    for (run,) in ranks:
        assert len(run["losses"]) == 24 / (len(ranks) * 2)
        assert run["stats"]["num_workers"] == len(ranks)


def both_runs_are_alike(ranks: Ranks, folder: Path) -> None:
    for one, other in ranks:
        close(one["losses"], other["losses"])
        same_weights(one, other)


def other_features() -> list[Feature]:
    found = []
    cluster = {"job_name": "worker", "worker_hosts": "one:1,two:2", "ps_hosts": "three:3", "task_index": 1}
    for name, mode in MODES.items():
        found.append(Feature(f"forward_only-{name}", 2, (of(forward_only=True, **mode),), nothing_is_trained))
        forward = of(forward_only=True, num_batches=7, train_dir="{folder}/trained", **mode)
        runs = (of(num_batches=5, train_dir="{folder}/trained", **mode), forward)
        found.append(Feature(f"forward_only_restores-{name}", 2, runs, restored_weights_stay))
        clustered = {**cluster, "controller_host": "four:4"} if name == "distributed_all_reduce" else cluster
        runs = (of(**mode), of(**mode, **clustered))
        found.append(Feature(f"ignores_a_cluster-{name}", 2, runs, both_runs_are_alike))
    for ranks in (2, 4):
        epochs = {"num_epochs": 24, "num_batches": None}  # of one example
        for mode in ("parameter_server", "replicated", "horovod"):
            found.append(Feature(f"epochs-{mode}", ranks, (of(**epochs, **MODES[mode]),), examples_of_all_ranks_count))
        decay = {"num_epochs_per_decay": 4.0 * ranks, "learning_rate_decay_factor": 0.5}
        runs = tuple(of(**decay, **MODES[mode]) for mode in ("horovod", "replicated"))
        found.append(Feature("decays_alike", ranks, runs, both_runs_are_alike))
    return found


FEATURES = [*loss_scale_features(), *evaluation_features(), *checkpoint_features(), *other_features()]


@pytest.fixture(scope="session")
def launches(request, tmp_path_factory, replaced):
    chosen = [case.configuration() for case in peers.selected(request.session.items, Feature)]
    return peers.Launches(tmp_path_factory.mktemp("features"), replaced, chosen)


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_feature(launches, case):
    wanted = case.configuration()
    case.check(launches.of(wanted), launches.folder_of(wanted))


# --- the program -----------------------------------------------------------------------------------------------------


def commands() -> list[str]:
    """Those of the docs, without their launcher."""
    docs = (ROOT / "docs" / "tf_cnn_benchmarks.md").read_text()
    values = dict(re.findall(r'^(CPU|RUN)="(.*)"$', docs, re.MULTILINE))
    program = values["RUN"].partition("tf_cnn_benchmarks.py ")[2].replace("$CPU", values["CPU"])
    return [f"{program} {flags}" for flags in re.findall(r"^\$RUN (.*)$", docs, re.MULTILINE)]


COMMANDS = commands()


def run_program(replaced: Path, tmp_path: Path, flags: str, said: tuple[str, ...]) -> str:
    """What the program printed on two ranks; each of the texts must be there once."""
    # For this program alone: the other tests of the session are for Keras 3.
    program = [
        "env",
        "TF_USE_LEGACY_KERAS=1",
        sys.executable,
        str(replaced / "tf_cnn_benchmarks.py"),
        *flags.split(),
        "--num_warmup_batches=1",
    ]
    ended = launchers.run(Launch("mpi", 2), program, tmp_path / "output.txt", 180)
    assert ended.code == 0, ended.tail()
    for text in said:
        assert ended.output.count(text) == 1, f"{text}\n{ended.tail()}"
    return ended.output


TRAINS = ("Done warm up", "total images/sec", "TensorFlow:", "Batch size:")


@pytest.mark.parametrize("flags", COMMANDS, ids=lambda flags: flags.partition("--variable_update=")[2])
def test_the_program(replaced, tmp_path, flags):
    more = f"--num_batches=4 --display_every=2 --train_dir={tmp_path / 'trained'}"
    output = run_program(replaced, tmp_path, f"{flags} {more}", TRAINS)
    assert len(re.findall(r"^[24]\timages/sec", output, re.MULTILINE)) == 2, output
    assert list((tmp_path / "trained").glob("model.ckpt-*.index"))


def test_the_program_with_images_of_files_and_evaluation(replaced, tmp_path):
    images = f"--data_dir={replaced / 'test_data' / 'fake_tf_record_data'} --data_name=imagenet"
    (flags,) = [flags for flags in COMMANDS if flags.endswith("=distributed_replicated")]
    flags = f"{flags} {images} --num_batches=2 --batch_size=2 --train_dir={tmp_path / 'trained'}"
    run_program(replaced, tmp_path, flags, TRAINS)
    accuracy = ("Accuracy of 2 ranks @ 1 =", "Accuracy @ 1 =", "TensorFlow:")
    run_program(replaced, tmp_path, f"{flags} --eval=True --eval_dir={tmp_path / 'evaluated'}", accuracy)


def test_every_mode_has_a_command():
    assert {re.findall("--variable_update=([a-z_]+)", flags)[0] for flags in COMMANDS} == {
        "independent",
        *(mode["variable_update"] for mode in MODES.values()),
    }
