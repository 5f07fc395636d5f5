"""Distributed values, a strategy and its input: what `tf.distribute` gives, where each rank is a process."""
