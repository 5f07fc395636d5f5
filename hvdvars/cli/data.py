"""The data sets of ``hvdvars train``, and which samples each rank takes in each step. NumPy only, no TensorFlow."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdvars.cli.errors import UsageError

ARRAYS = ("x_train", "y_train", "x_test", "y_test")

Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Dataset:
    """Samples and labels as stored; images are ``[sample, height, width, channel]``, vectors ``[sample, feature]``."""

    name: str
    x_train: npt.NDArray[Any]
    y_train: npt.NDArray[np.int64]
    x_test: npt.NDArray[Any]
    y_test: npt.NDArray[np.int64]
    classes: int

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(int(size) for size in self.x_train.shape[1:])

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal on all ranks, as JSON: shapes, dtypes, and a checksum of all labels and some samples."""
        stride = max(1, len(self.x_train) // 256)
        some = np.ascontiguousarray(self.x_train[::stride])
        return {
            "shapes": [list(getattr(self, name).shape) for name in ARRAYS],
            "dtype": self.x_train.dtype.name,
            "labels": [zlib.crc32(self.y_train.tobytes()), zlib.crc32(self.y_test.tobytes())],
            "samples": zlib.crc32(some.tobytes()),
        }


def load(text: str) -> Dataset:
    """The data set that ``--data`` names: ``digits`` or a ``.npz`` file.

    Local; every rank loads all of it. Raises UsageError, naming file and array, for what cannot be trained on.
    """
    return load_digits() if text == "digits" else load_npz(Path(text))


def load_digits() -> Dataset:
    """The 1797 digits of scikit-learn, 8×8, in [0, 1]: 1437 to train and 360 to test, the same in every run. Local."""
    from sklearn.datasets import load_digits as load_bunch
    from sklearn.model_selection import train_test_split

    bunch = load_bunch()
    images = (bunch.images / 16.0).astype(np.float32)[..., np.newaxis]
    labels = bunch.target.astype(np.int64)
    # Not --seed: the test set must be the same in every run.
    x_train, x_test, y_train, y_test = train_test_split(images, labels, test_size=360, stratify=labels, random_state=0)
    return Dataset("digits", x_train, y_train, x_test, y_test, classes=10)


def load_npz(path: Path) -> Dataset:
    """Read ``x_train``, ``y_train``, ``x_test`` and ``y_test`` from a ``.npz`` file.

    ``x_*``: numbers, ``[sample, height, width]``, ``[sample, height, width, channel]`` or ``[sample, feature]``; uint8
    is divided by 255 when it is used, other dtypes are taken as they are. ``y_*``: one integer per sample, from 0.
    Local. Raises UsageError, naming file and array.
    """
    arrays = _read(path)
    for part in ("train", "test"):
        _check_part(path, part, arrays)
    x_train, x_test = arrays["x_train"], arrays["x_test"]
    if x_train.shape[1:] != x_test.shape[1:] or x_train.dtype != x_test.dtype:
        raise _bad(
            f"{path}: x_train holds samples of shape {x_train.shape[1:]} and dtype {x_train.dtype}, x_test of shape "
            f"{x_test.shape[1:]} and dtype {x_test.dtype}; both must be the same"
        )
    y_train, y_test = (arrays[name].reshape(-1).astype(np.int64) for name in ("y_train", "y_test"))
    classes = int(max(y_train.max(), y_test.max())) + 1
    if classes > max(len(y_train), 2):
        raise _bad(
            f"{path}: the largest label is {classes - 1}, but there are only {len(y_train)} training samples; labels "
            "must be numbered from 0 without large gaps (np.unique(y, return_inverse=True) numbers them)"
        )
    if x_train.ndim == 3:
        x_train, x_test = x_train[..., np.newaxis], x_test[..., np.newaxis]
    return Dataset(path.name, x_train, y_train, x_test, y_test, classes)


def _read(path: Path) -> dict[str, npt.NDArray[Any]]:
    if path.suffix != ".npz":
        raise _bad(f"--data {str(path)!r}: expected digits or the path of a .npz file")
    try:
        if path.is_file() and not zipfile.is_zipfile(path):
            raise _bad(f"--data: {path} is not a .npz file (np.savez writes one)")
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in ARRAYS if name not in archive.files]
            if missing:
                has = ", ".join(archive.files) or "nothing"
                raise _bad(f"{path}: {', '.join(missing)} missing; the file has {has}")
            return {name: _read_array(path, archive, name) for name in ARRAYS}
    except OSError as problem:
        raise _bad(f"--data: cannot read {path}: {problem.strerror or problem}") from None


def _read_array(path: Path, archive: Any, name: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(archive[name])
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as problem:
        raise _bad(f"{path}: cannot read {name}: {problem}") from None


def _check_part(path: Path, part: str, arrays: dict[str, npt.NDArray[Any]]) -> None:
    x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
    if x.dtype.kind not in "fiub":
        raise _bad(f"{path}: x_{part} has dtype {x.dtype}; expected floats, integers or bool")
    if x.ndim not in (2, 3, 4) or 0 in x.shape[1:]:
        raise _bad(
            f"{path}: x_{part} has shape {x.shape}; expected [sample, feature], [sample, height, width] or "
            "[sample, height, width, channel]"
        )
    if y.shape not in ((len(x),), (len(x), 1)):
        hint = "; for one-hot labels use y.argmax(axis=1)" if y.ndim == 2 and len(y) == len(x) else ""
        raise _bad(
            f"{path}: y_{part} has shape {y.shape} beside x_{part} of shape {x.shape}; expected one label per "
            f"sample{hint}"
        )
    if y.dtype.kind not in "iu":
        raise _bad(f"{path}: y_{part} has dtype {y.dtype}; expected integers from 0")
    if len(x) == 0:
        raise _bad(f"{path}: x_{part} holds no sample")
    if y.min() < 0:
        raise _bad(f"{path}: y_{part} holds the label {y.min()}; expected integers from 0")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise _bad(f"{path}: x_{part} holds values that are not finite (NaN or infinity)")


def _bad(message: str) -> UsageError:
    return UsageError(message, said_by="node")


def to_inputs(x: npt.NDArray[Any]) -> Floats:
    """Samples as the model gets them: float32; uint8 divided by 255. Local."""
    scale = np.float32(1 / 255 if x.dtype == np.uint8 else 1)
    return np.multiply(x, scale, dtype=np.float32)


@dataclass(frozen=True)
class Step:
    """One rank's part of one step: ``batch_size`` samples, of which the last ``batch_size - count`` only fill up."""

    indices: Indices
    weights: Floats
    """1 for a sample, 0 for one that fills up."""
    total: int
    """Samples that count in this step, all ranks together."""


def epoch_order(count: int, seed: int, epoch: int) -> Indices:
    """The order in which all ranks together see ``count`` samples: equal on all ranks, new in each epoch. Local."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def steps_per_epoch(count: int, size: int, batch_size: int) -> int:
    """Steps in which ``size`` ranks see ``count`` samples once; equal on all ranks. Local."""
    return -(-count // (size * batch_size))


def shard(order: Indices, rank: int, size: int, batch_size: int) -> Iterator[Step]:
    """This rank's steps through ``order``: every ``size``-th sample, from the ``rank``-th on.

    The ranks' shards are disjoint and together hold each sample once. All ranks get the same number of steps, each of
    ``batch_size`` samples: what is missing in the last step is filled up with weight 0, so that no sample is lost and
    none counts twice. Local.
    """
    mine = order[rank::size]
    filler = mine if len(mine) else order[:1]
    for step in range(steps_per_epoch(len(order), size, batch_size)):
        indices = mine[step * batch_size : (step + 1) * batch_size]
        weights = np.zeros(batch_size, np.float32)
        weights[: len(indices)] = 1
        padded = np.concatenate([indices, np.resize(filler, batch_size - len(indices))])
        total = min(size * batch_size, len(order) - step * size * batch_size)
        yield Step(padded, weights, total)
