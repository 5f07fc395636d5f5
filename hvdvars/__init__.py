"""Variable management for TensorFlow on Horovod."""
