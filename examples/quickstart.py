"""Train the handwritten digits with an owner for every variable: horovodrun -np 2 python examples/quickstart.py."""

import tensorflow as tf
from sklearn.datasets import load_digits

import hvdvars as hv

hv.init()
digits = load_digits()
x = digits.images[hv.rank() :: hv.size(), ..., None].astype("float32") / 16  # every rank its own share
y = digits.target[hv.rank() :: hv.size()]
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(2000, seed=1).batch(32, drop_remainder=True).repeat()

layers = tf.keras.layers
model = tf.keras.Sequential([layers.Input((8, 8, 1)), layers.Conv2D(32, 3, activation="relu"), layers.Flatten()])
model.add(layers.Dense(10))
optimizer = tf.keras.optimizers.Adam(2e-3)
mgr = hv.create("parameter_server")  # or "horovod", "replicated", … : see the table of modes
mgr.broadcast([model, optimizer])


@tf.function
def step(images, labels):
    with tf.GradientTape() as tape:
        losses = tf.keras.losses.sparse_categorical_crossentropy(labels, model(images), from_logits=True)
        loss = tf.reduce_mean(losses)
    mgr.apply_gradients(optimizer, tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


for number, (images, labels) in enumerate(data.take(200)):
    loss = step(images, labels)
    if hv.rank() == 0 and number % 50 == 49:
        print(f"step {number + 1}: loss {loss:.3f}")
hv.verify(model.trainable_variables)
