"""One part of a run: checkpoint_program.py FILE MODE OPTIONS FIRST LAST. Restores FILE unless FIRST is 0; saves it.

OPTIONS are JSON. The gradients are means over a joined batch of twelve, whatever the number of ranks.
"""

import json
import sys

import numpy as np
import tensorflow as tf

import hvdvars as hv

file, mode, options, first, last = *sys.argv[1:4], *map(int, sys.argv[4:6])
hv.init()
mgr = hv.create(mode, **json.loads(options))
variables = [
    tf.Variable(np.full(shape, 0.1, "float32"), name=f"w{i}") for i, shape in enumerate([(4, 5), (5,), (5, 1)])
]
optimizer = tf.keras.optimizers.Adam(0.05)


@tf.function(autograph=False)
def step(x):
    with tf.GradientTape() as tape:
        kernel, bias, out = variables
        loss = tf.reduce_mean(tf.square(tf.tanh(x @ kernel + bias) @ out - 1.0))
    mgr.apply_gradients(optimizer, tape.gradient(loss, variables), variables)


if first:
    extra = hv.checkpoint.restore(file, mgr, variables=variables, optimizer=optimizer)
    assert extra == {"step": first}, extra
for number in range(first, last):
    batch = np.random.default_rng(number).standard_normal((12, 4)).astype("float32")
    step(tf.constant(np.array_split(batch, hv.size())[hv.rank()]))
hv.verify(variables)
hv.checkpoint.save(file, mgr, variables=variables, optimizer=optimizer, extra={"step": last})
hv.shutdown()
