"""Trains in a program that has turned TensorFlow 2's behaviour off. tf1_program.py MODE OPTIONS: prints what it found.

OPTIONS are JSON. Two towers in each rank; variables are references unless the mode says otherwise.
"""

import json
import sys
from pathlib import Path

import numpy as np
import tensorflow.compat.v1 as tf

import hvdvars as hv

tf.disable_v2_behavior()


def refusal(call):
    try:
        call()
    except (RuntimeError, ValueError) as problem:
        return str(problem)
    return "nothing was refused"


def build(mgr, towers=2):
    """A linear model of the sum of what the replicas say: the operations of a step, and the weights of each tower."""
    grads, weights = [], []
    for number in range(towers):
        with tf.device(mgr.get_devices()[number]), mgr.create_outer_variable_scope(number):
            weight = tf.get_variable("weight", [3], initializer=tf.constant_initializer(hv.rank() + 1.0))
            table = tf.get_variable("table", [9, 2], initializer=tf.ones_initializer())
            tf.get_variable("moving", [2], initializer=tf.constant_initializer(hv.rank() + 7.0), trainable=False)
            loss = tf.reduce_sum(weight * (2.0 * hv.rank() + number + 1.0)) + tf.reduce_sum(tf.gather(table, [4]))
            read = mgr.trainable_variables_on_device(number, number)
            written = mgr.trainable_variables_on_device(number, number, writable=True)
            grads.append(list(zip(tf.gradients(loss, read), written, strict=True)))
            weights.append(weight)
    devices, state = mgr.preprocess_device_grads(grads)
    ops = []
    for number in range(len(devices)):
        optimizer = tf.train.MomentumOptimizer(0.125, 0.0)
        pairs = mgr.get_gradients_to_apply(number, state)
        mgr.append_apply_gradients_ops(state, optimizer, pairs, ops)
    return tf.group(*ops), weights


def main(mode, options, folder):
    hv.init()
    mgr = hv.create(mode, local_towers=2, **options)
    train, weights = build(mgr)
    before_save = tf.group(*mgr.get_pre_save_ops())
    saver = tf.train.Saver(mgr.savable_variables()) if hv.rank() == 0 else None
    settings = tf.ConfigProto(device_count={"CPU": 2}, allow_soft_placement=True)
    with tf.Session(config=settings) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(mgr.get_post_init_ops())
        for _ in range(4):
            session.run(train)
        hv.barrier()
        session.run(before_save)
        if saver is not None:
            saver.save(session, str(folder / "run"))
            names = [name for name, _ in tf.train.list_variables(str(folder / "run"))]
        values = session.run(weights)
    grads, variables = [tf.ones([3])], [weights[0]]
    refusals = [
        refusal(lambda: mgr.apply_gradients(tf.train.GradientDescentOptimizer(0.1), grads, variables)),
        refusal(lambda: mgr.broadcast(variables)),
        refusal(lambda: hv.verify(variables)),
        refusal(lambda: hv.checkpoint.save(folder / "never", mgr, variables=variables)),
        refusal(mgr.flush),
    ]
    if hv.rank() == 0:
        found = {"weights": np.asarray(values).tolist(), "names": names, "refusals": refusals}
        (folder / "found.json").write_text(json.dumps(found))
    hv.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
