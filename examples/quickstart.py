"""Train the handwritten digits with an owner for every variable: horovodrun -np 2 python examples/quickstart.py."""

import tensorflow as tf
from sklearn.datasets import load_digits

import hvdvars as hv

hv.init()
x, y = (part[hv.rank() :: hv.size()] for part in load_digits(return_X_y=True))  # every rank its own share
data = tf.data.Dataset.from_tensor_slices((x / 16, y)).shuffle(2000, seed=1).repeat().batch(32)
model = tf.keras.Sequential([tf.keras.Input((64,)), tf.keras.layers.Dense(128, "relu"), tf.keras.layers.Dense(10)])
loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam(2e-3)
mgr = hv.create("parameter_server")  # or "horovod", "replicated", … : see the table of modes
mgr.broadcast([model, optimizer])


@tf.function
def step(images, labels):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images))
    mgr.apply_gradients(optimizer, tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


for images, labels in data.take(200):
    loss = step(images, labels)
hv.verify(model.trainable_variables)  # an error if the ranks' weights differ anywhere
print(f"rank {hv.rank()} of {hv.size()}: loss {loss:.3f}")
