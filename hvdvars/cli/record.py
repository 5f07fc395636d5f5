"""What rank 0 keeps in ``--train_dir``: ``metrics.jsonl``, TensorBoard events and ``curve.png``."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdvars.cli.show import EpochResult, as_json


class Records:
    """Keeps a run in ``folder``; keeps nothing where that is ``None`` (other ranks, or no ``--train_dir``). Local.

    ``metrics.jsonl`` has one JSON object per line, told apart by ``event``: ``start``, ``epoch``, ``end``. A second run
    into the same folder adds its lines after those of the first.
    """

    def __init__(self, folder: Path | None, settings: dict[str, Any]) -> None:
        self._folder = folder
        self._epochs: list[EpochResult] = []
        self._events: Any = None
        if folder is not None:
            self._events = tf.summary.create_file_writer(str(folder))
            self._line({"event": "start", **settings})

    def epoch(self, result: EpochResult) -> None:
        """Keep an epoch; on disk when this returns."""
        self._epochs.append(result)
        values = {"loss": result.loss, "accuracy": result.accuracy, "images_per_second": result.images_per_second}
        self._line({"event": "epoch", "epoch": result.epoch, **values, "seconds": result.seconds})
        self._scalars({f"train/{name}": value for name, value in values.items()}, result.epoch)

    def finish(self, summary: dict[str, Any]) -> None:
        """Keep the result and draw the curve."""
        if self._folder is None:
            return
        self._line({"event": "end", **summary})
        self._scalars({"test/accuracy": summary["test_accuracy"], "test/loss": summary["test_loss"]}, len(self._epochs))
        self._events.close()
        draw_curve(self._folder / "curve.png", self._epochs, summary)

    def _line(self, values: dict[str, Any]) -> None:
        if self._folder is None:
            return
        with (self._folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(as_json(values) + "\n")

    def _scalars(self, values: dict[str, float], step: int) -> None:
        if self._events is None:
            return
        # tf.summary.scalar needs the tensorboard package; the event itself does not.
        metadata = tf.compat.v1.SummaryMetadata(
            plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"), data_class=1
        )
        with self._events.as_default():
            for name, value in values.items():
                tf.summary.write(name, tf.constant(value, tf.float32), step=step, metadata=metadata)
        self._events.flush()


def draw_curve(path: Path, epochs: list[EpochResult], summary: dict[str, Any]) -> None:
    """Loss and accuracy by epoch, and the test values at the end, as a PNG; whole or absent. Local."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9.6, 4.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    numbers = [result.epoch for result in epochs]
    loss, accuracy = figure.subplots(1, 2)
    loss.plot(numbers, [result.loss for result in epochs], marker="o", markersize=4, label="training")
    loss.set_ylabel("loss (mean cross-entropy per sample)")
    accuracy.plot(numbers, [result.accuracy for result in epochs], marker="o", markersize=4, label="training")
    accuracy.set_ylabel("accuracy (share of samples)")
    for axes, name in ((loss, "test_loss"), (accuracy, "test_accuracy")):
        if math.isfinite(summary[name]):
            axes.axhline(summary[name], color="C1", linestyle="--", label=f"test, at the end: {summary[name]:.3f}")
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
        axes.legend()
    ranks = f"{summary['ranks']} rank{'s' if summary['ranks'] != 1 else ''}"
    figure.suptitle(f"{summary['model']} on {summary['data']}: {summary['variable_update']}, {ranks}")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, format="png")
    temporary.replace(path)
