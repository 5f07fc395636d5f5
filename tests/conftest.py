"""What all tests share: quiet TensorFlow, no GPU, and (by its place) `tests` on the import path."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# The tests are about CPU transports; several ranks on one GPU would only get into each other's way.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
