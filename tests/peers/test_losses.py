"""Every mode on N ranks of T towers does what the original does in one process with N·T towers, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import checkout
import numpy as np
import peers
import pytest
from launchers import Launch
from peers import BARE, Configuration

pytestmark = checkout.NEEDED

LAYOUTS = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]
"""Ranks, and towers on each."""

BATCH = 2
NUMBERS = [float(number) for number in range(-1, 15)]
"""The examples: those of the original's tests of variable updates."""

Params = dict[str, Any]


def same(params: Params, towers: int) -> Params:
    """The original takes the mode as it is."""
    return params


def sums(params: Params, towers: int) -> Params:
    """The original cannot run the mode in one process; this one sums gradients over towers too."""
    kept = {name: value for name, value in params.items() if name not in ("all_reduce_spec", "hierarchical_copy")}
    return {**kept, "variable_update": "replicated"}


def means(params: Params, towers: int) -> Params:
    """The same for modes that average."""
    return {**params, "variable_update": "parameter_server"}


def same_of_several(params: Params, towers: int) -> Params:
    """The original's algorithm needs two towers."""
    return params if towers > 1 else sums(params, towers)


@dataclass(frozen=True)
class Mode:
    """A mode with its options: how the original is to be run for it, and in which layouts it makes sense."""

    name: str
    params: Params = field(hash=False)
    reference: Callable[[Params, int], Params] = same
    towers: tuple[int, ...] = (1, 2)
    model: str = "test"
    tolerance: float = 1e-5


@dataclass(frozen=True)
class Case:
    """A mode in a layout."""

    mode: Mode
    ranks: int
    towers: int

    def __str__(self) -> str:
        return f"{self.ranks}x{self.towers}-{self.mode.name}"

    def ours(self) -> Configuration:
        """On the ranks of a launcher."""
        run = {"params": {**self.mode.params, "num_gpus": self.towers}, "images": NUMBERS, "model": self.mode.model}
        return Configuration(str(self), Launch("mpi", self.ranks), (run,))

    def original(self) -> Configuration:
        """In one process."""
        total = self.ranks * self.towers
        params = self.mode.reference({**self.mode.params}, total)
        images = join_batches(NUMBERS, self.ranks, self.towers)
        run = {"params": {**params, "num_gpus": total}, "images": images, "model": self.mode.model}
        return Configuration(str(self), BARE, (run,))


def join_batches(numbers: list[float], ranks: int, towers: int) -> list[float]:
    """The examples in the order in which one process gives tower r·T+t what tower t of rank r gets, at every step.

    Each rank begins at its share of the batches and goes round; a process gives its towers examples in turn.
    """
    size = BATCH * towers
    batches = np.reshape(numbers, (-1, BATCH, towers))
    assert batches.size == len(numbers) and len(numbers) % size == 0
    starts = [len(batches) * rank // ranks for rank in range(ranks)]
    steps = [
        np.concatenate([batches[(step + start) % len(batches)] for start in starts], 1) for step in range(len(batches))
    ]
    return np.ravel(steps).tolist()


def _modes() -> list[Mode]:
    found = []

    def add(name: str, update: str, reference: Any = same, **more: Any) -> None:
        about = {key: more.pop(key) for key in ("towers", "model", "tolerance") if key in more}
        found.append(Mode(name, {"variable_update": update, **more}, reference, **about))

    alone, server, replicated = "independent", "parameter_server", "replicated"
    # The original regularizes on its last tower only, which has no counterpart here where towers are alone.
    add("independent", alone, weight_decay=0.0)
    add("parameter_server", server)
    add("parameter_server-gpu", server, local_parameter_device="gpu")
    add("replicated", replicated)
    add("replicated-gpu", replicated, local_parameter_device="gpu")
    add("relaxed", replicated, variable_consistency="relaxed")
    add("repacking", replicated, gradient_repacking=2)
    add("repacking-relaxed", replicated, gradient_repacking=2, variable_consistency="relaxed")
    add("hierarchical_copy", replicated, hierarchical_copy=True, towers=(2,))
    for spec in ("xring", "xring#2", "collective"):
        add(spec, replicated, same_of_several, all_reduce_spec=spec)
    add("pscpu", replicated, all_reduce_spec="pscpu")
    add("pscpu#2", replicated, sums, all_reduce_spec="pscpu#2")
    add("psgpu", replicated, all_reduce_spec="psgpu")
    small = {"agg_small_grads_max_bytes": 1 << 20, "agg_small_grads_max_group": 3}
    add("small-pscpu", replicated, all_reduce_spec="pscpu", **small)
    add("small-xring", replicated, same_of_several, all_reduce_spec="xring", **small)
    add("distributed_all_reduce", "distributed_all_reduce", same_of_several, all_reduce_spec="pscpu:2k:xring")
    add("distributed_all_reduce-small", "distributed_all_reduce", same_of_several, all_reduce_spec="pscpu", **small)
    add("collective_all_reduce", "collective_all_reduce", sums, all_reduce_spec="collective")
    add("collective_all_reduce#2", "collective_all_reduce", sums, all_reduce_spec="collective#2")
    add("distributed_replicated", "distributed_replicated", means)
    add("horovod", "horovod", sums, towers=(1,))
    add("horovod-cpu", "horovod", sums, towers=(1,), horovod_device="cpu")
    for optimizer in ("momentum", "rmsprop"):
        add(f"{optimizer}-parameter_server", server, optimizer=optimizer)
        add(f"{optimizer}-replicated", replicated, optimizer=optimizer)
        add(f"{optimizer}-relaxed", replicated, optimizer=optimizer, variable_consistency="relaxed")
        add(f"{optimizer}-distributed_replicated", "distributed_replicated", means, optimizer=optimizer)
        add(f"{optimizer}-horovod", "horovod", sums, towers=(1,), optimizer=optimizer)
        add(f"{optimizer}-independent", alone, optimizer=optimizer, weight_decay=0.0)
    for update, reference in [(server, same), (replicated, same), ("distributed_replicated", means)]:
        add(f"clip-{update}", update, reference, gradient_clip=2.0)
        add(f"base_loss-{update}", update, reference, loss_type_to_report="base_loss")
    wide = {"model": "wide", "optimizer": "momentum"}
    add("wide-parameter_server", server, **wide)
    add("wide-replicated", replicated, **wide)
    add("wide-repacking", replicated, gradient_repacking=4, **wide)
    add("wide-xring", replicated, same_of_several, all_reduce_spec="xring#2", **wide)
    add("wide-small", replicated, all_reduce_spec="pscpu", **wide, **small)
    hybrid = "pscpu:32:xring:64:xring#2"
    add("wide-distributed_all_reduce", "distributed_all_reduce", same_of_several, all_reduce_spec=hybrid, **wide)
    add("wide-collective_all_reduce", "collective_all_reduce", sums, all_reduce_spec="collective#2", **wide)
    add("wide-distributed_replicated", "distributed_replicated", means, **wide)
    half = {"use_fp16": True, "tolerance": 1e-2, "model": "wide"}
    add("fp16", replicated, compact_gradient_transfer=False, **half)
    add("fp16-compact", replicated, compact_gradient_transfer=True, **half)
    add("fp16-compact-repacking", replicated, gradient_repacking=2, **half)
    add("fp16-parameter_server", server, **half)
    add("fp16-distributed_replicated", "distributed_replicated", means, **half)
    return found


CASES = [Case(mode, ranks, towers) for ranks, towers in LAYOUTS for mode in _modes() if towers in mode.towers]


@pytest.fixture(scope="session")
def launches(request, tmp_path_factory, original, replaced):
    chosen = peers.selected(request.session.items, Case)
    folder = tmp_path_factory.mktemp("losses")
    ours = peers.Launches(folder, replaced, [case.ours() for case in chosen])
    return ours, peers.Launches(folder, original, [case.original() for case in chosen])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_weights_are_those_of_one_process(launches, case):
    ours, original = launches
    ((expected,),) = original.of(case.original())
    ranks = [run for (run,) in ours.of(case.ours())]
    close = {"rtol": case.mode.tolerance, "atol": case.mode.tolerance / 10}
    losses = np.mean([run["losses"] for run in ranks], 0)
    assert len(losses) == 5
    np.testing.assert_allclose(losses, expected["losses"], **close)
    towers = [tower for run in ranks for tower in run["weights"]]
    assert len(towers) == len(expected["weights"])
    for mine, theirs in zip(towers, expected["weights"], strict=True):
        assert sorted(mine) == sorted(theirs)
        for name, value in mine.items():
            np.testing.assert_allclose(value, theirs[name], err_msg=name, **close)


@dataclass(frozen=True)
class Staged:
    """Variables that are read one step late, on N ranks of T towers; twice, since the original's vary."""

    ranks: int
    towers: int

    def __str__(self) -> str:
        return f"{self.ranks}x{self.towers}-staged"

    def ours(self) -> Configuration:
        """On the ranks of a launcher."""
        params = {"variable_update": "parameter_server", "staged_vars": True, "num_gpus": self.towers, "num_batches": 6}
        return Configuration(str(self), Launch("mpi", self.ranks), ({"params": params, "images": NUMBERS},) * 2)


def simulate_staged(batches: np.ndarray, steps: int) -> tuple[list[float], tuple[float, float]]:
    """Losses and weights (A, B) of the test model, where all examples of a step are a row of `batches`.

    The pipeline is filled with the first batch's gradients. A step then reads the weights of the step before, and
    applies the gradients of the step before.
    """
    rate, decay = 2**-6, 2**-4
    history = [np.array([1.0, 2.0])]
    means = batches.mean(1)

    def gradient(weights: np.ndarray, batch: int) -> np.ndarray:
        return means[batch % len(means)] * weights[::-1] + decay * weights

    losses, waiting = [], gradient(history[0], 0)
    for step in range(steps):
        read = history[max(step - 1, 0)]
        losses.append(means[(step + 1) % len(means)] * read[0] * read[1] + decay * 0.5 * (read**2).sum())
        history.append(history[-1] - rate * waiting)
        waiting = gradient(read, step + 1)
    return losses, tuple(history[-1])


@pytest.fixture(scope="session")
def staged(request, tmp_path_factory, replaced):
    chosen = [case.ours() for case in peers.selected(request.session.items, Staged)]
    return peers.Launches(tmp_path_factory.mktemp("staged"), replaced, chosen)


@pytest.mark.parametrize("case", [Staged(*layout) for layout in LAYOUTS], ids=str)
def test_staged_variables_are_late_by_one_step_in_every_run(staged, case):
    ranks = staged.of(case.ours())
    batches = np.reshape(join_batches(NUMBERS, case.ranks, case.towers), (-1, BATCH * case.ranks * case.towers))
    losses, weights = simulate_staged(batches, 6)
    np.testing.assert_allclose(np.mean([run["losses"] for run, _ in ranks], 0), losses, rtol=1e-5)
    for run, again in ranks:
        assert (run["losses"], run["weights"]) == (again["losses"], again["weights"])
        for tower in run["weights"]:
            np.testing.assert_allclose([np.ravel(tower[name])[0] for name in sorted(tower)], weights, rtol=1e-5)
