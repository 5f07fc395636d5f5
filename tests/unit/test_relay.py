"""Outcomes that all ranks share, and arrays on the move, on one rank."""

import numpy as np
import pytest
import tensorflow as tf
from checkpoint_tools import use_world

from hvdvars import relay, session


@pytest.fixture(autouse=True)
def one_rank():
    use_world()
    yield
    session.stop()


def test_errors_keep_their_kind_and_name_the_function():
    def fail(error):
        raise error

    for error, kind in [
        (ValueError("a"), ValueError),
        (PermissionError(13, "a"), PermissionError),
        (NotADirectoryError("a"), OSError),
        (KeyError("a"), RuntimeError),
        (tf.errors.InvalidArgumentError(None, None, "a"), RuntimeError),
    ]:
        for share in (relay.together, relay.from_root):
            with pytest.raises(kind, match=r"^f: .*a") as caught:
                share("f", lambda error=error: fail(error))
            assert caught.value.__cause__ is error
    assert relay.together("f", lambda: 3) == relay.from_root("f", lambda: 3) == 3


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_arrays_arrive_whatever_the_chunk(monkeypatch, chunk):
    monkeypatch.setattr(relay, "CHUNK_BYTES", chunk)
    bfloat16 = tf.bfloat16.as_numpy_dtype
    arrays = {
        "a": np.arange(3, dtype="uint8"),
        "b": np.arange(6.0).reshape(2, 3).T,
        "c": np.float32(3),
        "d": np.zeros((0, 2)),
        "e": np.arange(5).astype(bfloat16),
        "f": np.array([True, False]),
    }
    arrays = {key: np.asarray(value) for key, value in arrays.items()}
    received = dict(relay.deliver(arrays, relay.layout_of(arrays), "test"))
    assert received.keys() == arrays.keys()
    (own,) = relay.collect(list(arrays.values()), "test")
    for array, one, two in zip(arrays.values(), received.values(), own, strict=True):
        assert array.dtype == one.dtype == two.dtype and array.shape == one.shape == two.shape
        np.testing.assert_array_equal(array, one)
        np.testing.assert_array_equal(array, two)
