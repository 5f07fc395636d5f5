"""A graph of TensorFlow 1 with two towers on each rank: mpirun -np 2 python examples/tower_graph.py."""

import numpy as np
import tensorflow as tf

import hvdvars as hv

v1, towers = tf.compat.v1, 2
hv.init()
mgr = hv.create("parameter_server", local_towers=towers)  # or "horovod", "replicated", "distributed_replicated", …
with tf.Graph().as_default():
    device_grads, losses, training_ops = [], [], []
    for number, device in enumerate(mgr.get_devices()):
        x = np.random.RandomState(hv.rank() * towers + number).randn(32, 4).astype("float32")  # this tower's examples
        with v1.device(device), mgr.create_outer_variable_scope(number):
            kernel = v1.get_variable("kernel", [4, 1], initializer=v1.random_normal_initializer())
            losses.append(tf.reduce_mean(tf.square(x @ kernel - x.sum(1, keepdims=True))))
            grads = tf.gradients(losses[-1], mgr.trainable_variables_on_device(number, number))
            written = mgr.trainable_variables_on_device(number, number, writable=True)
        device_grads.append(list(zip(grads, written, strict=True)))
    devices, state = mgr.preprocess_device_grads(device_grads)
    for number, device in enumerate(devices):
        with v1.device(device):
            pairs, optimizer = mgr.get_gradients_to_apply(number, state), v1.train.MomentumOptimizer(0.02, 0.9)
            mgr.append_apply_gradients_ops(state, optimizer, pairs, training_ops)
    train, before_save = tf.group(*training_ops), tf.group(*mgr.get_pre_save_ops())
    with tf.control_dependencies([v1.local_variables_initializer()]):
        post_init = tf.group(*mgr.get_post_init_ops())  # rank 0's values, on every rank
    with v1.Session(config=v1.ConfigProto(device_count={"CPU": towers}, allow_soft_placement=True)) as session:
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        session.run(post_init)
        for _ in range(100):
            loss, _ = session.run([losses[0], train])
        session.run(before_save)  # on every rank, before rank 0 saves mgr.savable_variables()
        print(f"rank {hv.rank()} of {hv.size()}: loss {loss:.5f}, kernel {session.run(written[0]).ravel().round(3)}")
