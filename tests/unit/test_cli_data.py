"""Data sets of the command, and the shards of the ranks."""

import sys

import numpy as np
import pytest

from hvdvars.cli import data
from hvdvars.cli.errors import UsageError


def arrays(**changes):
    generator = np.random.default_rng(0)
    values = {
        "x_train": generator.integers(0, 256, (20, 6, 5), np.uint8),
        "y_train": np.arange(20) % 4,
        "x_test": generator.integers(0, 256, (7, 6, 5), np.uint8),
        "y_test": np.arange(7) % 4,
    }
    values.update(changes)
    return {name: value for name, value in values.items() if value is not None}


def save(folder, **changes):
    path = folder / "set.npz"
    np.savez(path, **arrays(**changes))
    return path


def test_digits_are_split_the_same_way_each_time():
    digits = data.load("digits")
    assert digits.x_train.shape == (1437, 8, 8, 1)
    assert digits.x_test.shape == (360, 8, 8, 1)
    assert digits.x_train.dtype == np.float32
    assert (digits.x_train.min(), digits.x_train.max()) == (0, 1)
    counts = np.bincount(digits.y_test)
    assert len(counts) == digits.classes == 10
    assert counts.min() >= 34  # Stratified: about 36 of each.
    assert digits.fingerprint() == data.load("digits").fingerprint()
    together = np.concatenate([digits.x_train, digits.x_test]).reshape(1797, -1)
    from sklearn.datasets import load_digits

    assert sorted(map(tuple, together)) == sorted(map(tuple, (load_digits().data / 16).astype(np.float32)))


def test_npz_images_get_a_channel_and_uint8_is_scaled(tmp_path):
    found = data.load(str(save(tmp_path)))
    assert found.input_shape == (6, 5, 1)
    assert found.classes == 4
    assert found.x_train.dtype == np.uint8
    given = data.to_inputs(found.x_train)
    assert given.dtype == np.float32
    np.testing.assert_allclose(given[..., 0], arrays()["x_train"] / 255, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int16", "bool"])
def test_other_dtypes_are_taken_as_they_are(tmp_path, dtype):
    x = np.arange(20 * 3).reshape(20, 3).astype(dtype)
    found = data.load(str(save(tmp_path, x_train=x, x_test=x[:7])))
    assert found.input_shape == (3,)
    np.testing.assert_array_equal(data.to_inputs(found.x_train), x.astype("float32"))


def test_labels_of_shape_n_1(tmp_path):
    found = data.load(str(save(tmp_path, y_train=(np.arange(20) % 4).reshape(20, 1).astype("uint8"))))
    assert found.y_train.shape == (20,)
    assert found.y_train.dtype == np.int64


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"y_test": None}, ["y_test missing", "x_train"]),
        ({"x_train": np.zeros((20,))}, ["x_train", "shape (20,)"]),
        ({"x_train": np.zeros((20, 0))}, ["x_train", "shape (20, 0)"]),
        ({"x_train": np.zeros((20, 6, 5), "complex64")}, ["x_train", "complex64"]),
        ({"x_train": np.full((20, 6, 5), "a")}, ["x_train", "<U1"]),
        ({"x_train": np.full((20, 6, 5), None)}, ["x_train"]),
        ({"x_train": np.full((20, 6, 5), np.nan)}, ["x_train", "NaN"]),
        ({"x_test": np.zeros((7, 6, 4), "uint8")}, ["(6, 5)", "(6, 4)"]),
        ({"x_test": np.zeros((7, 6, 5), "float32")}, ["uint8", "float32"]),
        ({"x_test": np.zeros((0, 6, 5), "uint8"), "y_test": np.zeros(0, int)}, ["x_test", "no sample"]),
        ({"y_train": np.arange(19)}, ["y_train", "(19,)", "(20, 6, 5)"]),
        ({"y_train": np.eye(20)}, ["y_train", "argmax"]),
        ({"y_train": np.zeros(20)}, ["y_train", "float64", "integers"]),
        ({"y_test": np.arange(7) - 1}, ["y_test", "-1"]),
        ({"y_test": np.arange(7) + 2000}, ["2006", "20 training samples"]),
    ],
)
def test_bad_arrays(tmp_path, changes, parts):
    path = save(tmp_path, **changes)
    with pytest.raises(UsageError) as caught:
        data.load(str(path))
    assert caught.value.said_by == "node"
    for part in [str(path), *parts]:
        assert part in str(caught.value)


def test_bad_files(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        data.load(str(tmp_path / "absent.npz"))
    with pytest.raises(UsageError, match="digits or the path of a .npz file"):
        data.load("digit")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(UsageError, match="not a .npz file"):
        data.load(str(tmp_path / "text.npz"))
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(UsageError, match="folder.npz"):
        data.load(str(tmp_path / "folder.npz"))
    whole = save(tmp_path).read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="cut.npz"):
        data.load(str(tmp_path / "cut.npz"))


def test_fingerprint_sees_other_content():
    one = data.load("digits")
    other = data.Dataset(one.name, one.x_train, one.y_train[::-1], one.x_test, one.y_test, one.classes)
    assert one.fingerprint() != other.fingerprint()


@pytest.mark.parametrize("count", [1, 2, 5, 24, 25, 96, 97])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_shards(count, size, batch_size):
    """Disjoint, complete, of one length, and weighted so that each sample counts once."""
    order = data.epoch_order(count, seed=7, epoch=1)
    shards = [list(data.shard(order, rank, size, batch_size)) for rank in range(size)]
    steps = data.steps_per_epoch(count, size, batch_size)
    assert [len(steps_of_rank) for steps_of_rank in shards] == [steps] * size
    seen = []
    for parts in zip(*shards, strict=True):
        counted = [part.indices[part.weights == 1] for part in parts]
        assert all(len(part.indices) == len(part.weights) == batch_size for part in parts)
        assert {part.total for part in parts} == {sum(map(len, counted))}
        assert max(map(len, counted)) - min(map(len, counted)) <= 1
        assert all(set(part.weights) <= {0, 1} for part in parts)
        seen.extend(np.concatenate(counted))
    assert sorted(seen) == list(range(count))


def test_mean_over_ranks_is_the_mean_over_samples():
    """What the loop divides by: sums of losses ÷ (total ÷ ranks), averaged over the ranks."""
    losses = np.random.default_rng(3).normal(size=11)
    size = 3
    for parts in zip(*(data.shard(np.arange(11), rank, size, 2) for rank in range(size)), strict=True):
        local = [(losses[part.indices] * part.weights).sum() / (part.total / size) for part in parts]
        joined = np.concatenate([part.indices[part.weights == 1] for part in parts])
        np.testing.assert_allclose(np.mean(local), losses[joined].mean())


def test_orders_differ_by_epoch_and_seed_only():
    first = data.epoch_order(50, seed=1, epoch=1)
    np.testing.assert_array_equal(first, data.epoch_order(50, seed=1, epoch=1))
    assert (first != data.epoch_order(50, seed=1, epoch=2)).any()
    assert (first != data.epoch_order(50, seed=2, epoch=1)).any()


def test_no_tensorflow():
    import subprocess

    program = "import sys, hvdvars.cli.data as d; d.load('digits'); print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
