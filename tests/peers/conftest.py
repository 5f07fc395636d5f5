"""Copies of the checkout, and what Keras it is for."""

import os
from pathlib import Path

import checkout
import pytest

# Before TensorFlow is loaded, here and in every rank.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Path:
    """The checkout with its own managers."""
    return checkout.copy(tmp_path_factory.mktemp("original") / "tf_cnn_benchmarks")


@pytest.fixture(scope="session")
def replaced(tmp_path_factory) -> Path:
    """The checkout with ours."""
    return checkout.change(checkout.copy(tmp_path_factory.mktemp("replaced") / "tf_cnn_benchmarks"))
