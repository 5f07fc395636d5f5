"""Copies of the checkout."""

from pathlib import Path

import checkout
import pytest


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Path:
    """The checkout with its own managers."""
    return checkout.copy(tmp_path_factory.mktemp("original") / "tf_cnn_benchmarks")


@pytest.fixture(scope="session")
def replaced(tmp_path_factory) -> Path:
    """The checkout with ours."""
    return checkout.change(checkout.copy(tmp_path_factory.mktemp("replaced") / "tf_cnn_benchmarks"))
