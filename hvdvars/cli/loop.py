"""Training and evaluation of one model on this rank, in step with the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvdvars as hv
from hvdvars import collectives
from hvdvars.cli import data, models
from hvdvars.cli.data import Dataset, Step
from hvdvars.cli.flags import TrainFlags
from hvdvars.cli.show import EpochResult


class Trainer:
    """A model, its optimizer and the data of this rank.

    Rank 0's weights are broadcast at the start. Statistics that layers collect (BatchNormalization's moving mean and
    variance) belong to a rank while it trains and are averaged over the ranks before evaluation; seeds of dropout
    belong to a rank always. The independent mode does neither: each rank has a model of its own.
    """

    def __init__(self, flags: TrainFlags, dataset: Dataset, manager: Any) -> None:
        self._flags, self._dataset, self._manager = flags, dataset, manager
        self._independent = flags.variable_update == "independent"
        # Each rank its own seeds, for dropout; the weights made here are replaced by rank 0's.
        seed = np.random.SeedSequence([flags.seed, hv.rank()]).generate_state(1)[0]
        tf.keras.utils.set_random_seed(int(seed))
        self.model = models.build_model(flags.model, dataset.input_shape, dataset.classes)
        some = data.to_inputs(dataset.x_train[:4])
        self._probabilities = models.gives_probabilities(flags.model, self.model, some, dataset.classes)
        self.optimizer = models.make_optimizer(flags.optimizer, flags.learning_rate)
        self.learning_rate = float(f"{float(tf.convert_to_tensor(self.optimizer.learning_rate)):.6g}")  # Not 0.001 + ε.
        self.parameters = models.count_parameters(self.model.weights)
        self.steps_per_epoch = data.steps_per_epoch(len(dataset.y_train), hv.size(), flags.batch_size)
        # Without AutoGraph, which would rewrite Keras and the manager; Horovod's operations do not compile with XLA.
        self._train_step = tf.function(self._train, autograph=False, jit_compile=False)
        self._test_step = tf.function(self._test, autograph=False, jit_compile=False)
        self._tally = np.zeros(3)
        self._seconds = self._timed_images = 0.0

    def broadcast(self) -> None:
        """Give every rank rank 0's weights. Collective: every rank calls it."""
        self._manager.broadcast(self.model.weights)

    def epoch(self, epoch: int) -> Iterator[int]:
        """Train one epoch and yield, after each step, how many images it had, all ranks together.

        Collective: every rank goes through all of it.
        """
        order = data.epoch_order(len(self._dataset.y_train), self._flags.seed, epoch)
        steps = data.shard(order, hv.rank(), hv.size(), self._flags.batch_size)
        sums = tf.zeros(3, tf.float64)
        self._timed_images = 0.0
        begun = time.perf_counter()
        for number, step in enumerate(steps):
            x, y, weights = self._batch(self._dataset.x_train, self._dataset.y_train, step)
            sums += self._train_step(x, y, weights, self._divisor(step))
            # The first step of all is spent on tracing: it says nothing about the speed of the others.
            if epoch == 1 and number == 0 and self.steps_per_epoch > 1:
                begun = time.perf_counter()
            else:
                self._timed_images += step.total
            yield step.total
        self._tally = sums.numpy()
        self._seconds = time.perf_counter() - begun

    def result(self, epoch: int) -> EpochResult:
        """Loss and accuracy of the epoch just trained, over all ranks. Collective: every rank calls it."""
        loss, accuracy, _, _ = self._over_ranks(self._tally, "hvdvars.train.epoch")
        return EpochResult(
            epoch=epoch,
            loss=loss,
            accuracy=accuracy,
            images_per_second=self._timed_images / max(self._seconds, 1e-9),
            seconds=self._seconds,
        )

    def evaluate(self) -> dict[str, Any]:
        """Accuracy and loss on the whole test set: each rank takes its share, of which each sample counts once.

        Collective: every rank calls it.
        """
        count = len(self._dataset.y_test)
        sums = np.zeros(3)
        for step in data.shard(np.arange(count), hv.rank(), hv.size(), self._flags.batch_size):
            sums += self._test_step(*self._batch(self._dataset.x_test, self._dataset.y_test, step)).numpy()
        loss, accuracy, correct, total = self._over_ranks(sums, "hvdvars.train.test")
        return {"test_accuracy": accuracy, "test_loss": loss, "test_correct": correct, "test_count": total}

    def finish(self) -> None:
        """Apply what is pending and make the ranks' statistics one. Collective: every rank calls it."""
        self._manager.flush()
        if not self._independent:
            average_over_ranks(self._statistics())

    def verify(self) -> tuple[bool | None, str]:
        """Whether all ranks hold the same model, and what differs; ``None`` where nobody expects it.

        Collective: every rank calls it.
        """
        if self._independent:
            return None, ""
        try:
            hv.verify([*self.model.trainable_variables, *self._statistics()])
        except (RuntimeError, ValueError) as problem:
            return False, str(problem)
        return True, ""

    def save(self, path: Path) -> None:
        """Write a checkpoint. Collective: every rank calls it."""
        hv.checkpoint.save(str(path), self._manager, model=self.model, optimizer=self.optimizer)

    def _statistics(self) -> list[Any]:
        """Weights that are not trained but collected from the data. (Seeds and counters are no floats.)"""
        weights = self.model.non_trainable_weights
        return [weight for weight in weights if tf.as_dtype(weight.dtype).is_floating]

    def _batch(self, x: Any, y: Any, step: Step) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        inputs = data.to_inputs(x[step.indices])
        return tf.constant(inputs), tf.constant(y[step.indices]), tf.constant(step.weights)

    def _divisor(self, step: Step) -> tf.Tensor:
        """What this rank's sum of losses is divided by, so that the mean over ranks is the mean over all samples."""
        count = max(float(step.weights.sum()), 1.0) if self._independent else step.total / hv.size()
        return tf.constant(count, tf.float32)

    def _train(self, x: tf.Tensor, y: tf.Tensor, weights: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            scores = self.model(x, training=True)
            losses = self._losses(y, scores) * weights
            loss = tf.reduce_sum(losses) / divisor
            for extra in self.model.losses:  # Regularization.
                loss += tf.cast(extra, loss.dtype)
            loss *= tf.cast(self._manager.loss_scale, loss.dtype)
        variables = self.model.trainable_variables
        grads = tape.gradient(loss, variables)
        self._manager.apply_gradients(self.optimizer, grads, variables)
        return self._sums(losses, y, scores, weights)

    def _test(self, x: tf.Tensor, y: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        scores = self.model(x, training=False)
        return self._sums(self._losses(y, scores) * weights, y, scores, weights)

    def _losses(self, y: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
        return tf.keras.losses.sparse_categorical_crossentropy(
            y, tf.cast(scores, tf.float32), from_logits=not self._probabilities
        )

    def _sums(self, losses: tf.Tensor, y: tf.Tensor, scores: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        """Loss, correct answers and samples; float64 holds counts exactly."""
        right = tf.cast(tf.equal(tf.argmax(scores, axis=1), y), tf.float64)
        weights = tf.cast(weights, tf.float64)
        return tf.stack(
            [tf.reduce_sum(tf.cast(losses, tf.float64)), tf.reduce_sum(right * weights), tf.reduce_sum(weights)]
        )

    def _over_ranks(self, sums: Any, name: str) -> tuple[float, float, int, int]:
        """Mean loss, accuracy, correct answers and samples of all ranks, by one collective."""
        loss, correct, count = collectives.all_reduce(tf.constant(sums, tf.float64), name).numpy().tolist()
        return loss / count, correct / count, int(correct), int(count)


def average_over_ranks(variables: list[Any]) -> None:
    """Replace float variables by their mean over the ranks, one collective per dtype.

    Collective: every rank calls it with the same variables.
    """
    for dtype in sorted({tf.as_dtype(variable.dtype).name for variable in variables}):
        alike = [variable for variable in variables if tf.as_dtype(variable.dtype).name == dtype]
        flat = tf.concat([tf.reshape(tf.convert_to_tensor(variable), [-1]) for variable in alike], axis=0)
        mean = collectives.all_reduce(flat, f"hvdvars.train.statistics.{dtype}", scale=1.0 / hv.size())
        sizes = [int(np.prod(variable.shape)) for variable in alike]
        for variable, part in zip(alike, tf.split(mean, sizes), strict=True):
            variable.assign(tf.reshape(part, variable.shape))
