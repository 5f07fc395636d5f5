"""``hvdvars train``: check what needs no TensorFlow, start the ranks, train, and show the result."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdvars.cli import data
from hvdvars.cli.data import Dataset
from hvdvars.cli.errors import UsageError, launched_rank
from hvdvars.cli.flags import TrainFlags

if TYPE_CHECKING:
    from hvdvars.cli.loop import Trainer
    from hvdvars.cli.show import Screen

_RANK_0_ONLY = ("train_dir", "json", "quiet")


def run(flags: TrainFlags) -> int:
    """Train as the flags say and give the exit code: 0, or 1 if the loss became infinite or NaN, or replicas differ.

    Collective: every rank calls it. Raises UsageError for input that cannot be trained on.
    """
    dataset = prepare(flags)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Start-up remarks, once per rank, hide what matters.
    import hvdvars as hv
    from hvdvars.cli import show

    try:
        hv.init()
    except (RuntimeError, ValueError) as problem:
        if hv.is_initialized():  # The others have joined: end them too.
            raise
        raise UsageError(str(problem), said_by="every") from problem
    trainer, manager = _start(flags, dataset)
    first = hv.rank() == 0
    screen = show.Screen(first and not flags.quiet, sys.stderr if flags.json else sys.stdout)
    summary = _train(flags, dataset, trainer, manager, screen)
    if first:
        _show_result(flags, summary)
    hv.shutdown()
    return 1 if summary["diverged"] or summary["replicas_identical"] is False else 0


def prepare(flags: TrainFlags) -> Dataset:
    """Load the data and create ``train_dir``, before TensorFlow is loaded. Local. Raises UsageError."""
    dataset = data.load(flags.data)
    if flags.model == "cnn" and len(dataset.input_shape) != 3:
        raise UsageError(
            f"--model cnn works on images, but one sample has shape {dataset.input_shape}; use --model mlp"
        )
    if flags.train_dir is not None and launched_rank() == 0:
        _create_folder(flags.train_dir)
    return dataset


def _create_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        raise UsageError(f"--train_dir: cannot write to {folder}: {problem.strerror or problem}") from None


def _start(flags: TrainFlags, dataset: Dataset) -> tuple[Trainer, Any]:
    """Make the model and the manager, and see that all ranks have the same work and none has an objection."""
    import hvdvars as hv
    from hvdvars import meeting
    from hvdvars.cli.loop import Trainer

    objection, trainer = None, None
    try:
        try:
            manager = hv.create(flags.variable_update, **flags.options)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise UsageError(str(problem)) from problem
        trainer = Trainer(flags, dataset, manager)
    except UsageError as problem:
        objection = str(problem)
    work = {name: str(value) for name, value in dataclasses.asdict(flags).items() if name not in _RANK_0_ONLY}
    work["train_dir"] = str(flags.train_dir is not None)  # a checkpoint is written by all ranks together
    answers = meeting.gather_objects([objection, work, dataset.fingerprint()], "train.start")
    _check_agreement(flags, answers)
    if trainer is None:  # Not reached: this rank's objection is among the answers.
        raise UsageError(str(objection))
    return trainer, manager


def _check_agreement(flags: TrainFlags, answers: list[Any]) -> None:
    _, work, content = answers[0]
    for rank, (objection, its_work, its_content) in enumerate(answers):
        if objection is not None:
            raise UsageError(objection if rank == 0 else f"on rank {rank}: {objection}")
        differ = [f"--{name}" for name in work if its_work[name] != work[name]]
        if its_content != content and not differ:
            differ = [f"the content of --data {flags.data}"]
        if differ:
            raise UsageError(f"rank {rank} and rank 0 differ in {', '.join(differ)}; all ranks need the same")


def _train(flags: TrainFlags, dataset: Dataset, trainer: Trainer, manager: Any, screen: Screen) -> dict[str, Any]:
    import hvdvars as hv
    from hvdvars.cli import record, show

    settings = _settings(flags, dataset, trainer)
    records = record.Records(flags.train_dir if hv.rank() == 0 else None, settings)
    started = time.perf_counter()
    trainer.broadcast()
    shown = False
    for epoch in range(1, flags.epochs + 1):
        with screen.progress(epoch, flags.epochs, len(dataset.y_train)) as advance:
            for images in trainer.epoch(epoch):
                if not shown:  # The manager's plans are made in the first step.
                    screen.start({**show.report_rows(manager.report()), **_work_rows(flags, dataset, trainer)})
                    shown = True
                advance(images)
        result = trainer.result(epoch)
        screen.epoch(result, flags.epochs)
        records.epoch(result)
        if not math.isfinite(result.loss):  # the same on every rank, and no epoch makes it better
            break
    trainer.finish()
    seconds = round(time.perf_counter() - started, 3)
    summary = {**settings, **dataclasses.asdict(result), "train_seconds": seconds, **trainer.evaluate()}
    summary["diverged"] = not math.isfinite(result.loss)
    summary["replicas_identical"], summary["replicas_differ"] = trainer.verify()
    summary["report"] = manager.report()
    records.finish(summary)
    if flags.train_dir is not None and not summary["diverged"]:
        trainer.save(flags.train_dir / "checkpoint")
    return summary


def _settings(flags: TrainFlags, dataset: Dataset, trainer: Trainer) -> dict[str, Any]:
    import hvdvars as hv

    settings = {name: value for name, value in dataclasses.asdict(flags).items() if name not in ("json", "quiet")}
    return {
        "ranks": hv.size(),
        **settings,
        "learning_rate": trainer.learning_rate,
        "parameters": trainer.parameters,
        "train_samples": len(dataset.y_train),
        "steps_per_epoch": trainer.steps_per_epoch,
    }


def _work_rows(flags: TrainFlags, dataset: Dataset, trainer: Trainer) -> dict[str, str]:
    import hvdvars as hv

    shape = "x".join(str(size) for size in dataset.input_shape)
    rows = {
        "options": ", ".join(f"{name}={value}" for name, value in flags.options.items()),
        "model": f"{flags.model}, {trainer.parameters:,} parameters, input {shape}, {dataset.classes} classes",
        "data": f"{dataset.name}, {len(dataset.y_train):,} to train, {len(dataset.y_test):,} to test",
        "steps": f"{trainer.steps_per_epoch} per epoch, {hv.size()} x {flags.batch_size} samples each",
        "optimizer": f"{flags.optimizer}, learning rate {trainer.learning_rate:g}",
    }
    return {name: text for name, text in rows.items() if text}


def _show_result(flags: TrainFlags, summary: dict[str, Any]) -> None:
    from hvdvars.cli import show

    lines = show.result_lines(summary)
    if flags.json:
        print(show.as_json(summary), flush=True)
        if not flags.quiet:
            print("\n".join(lines), file=sys.stderr, flush=True)
        return
    print("\n".join(lines), flush=True)
