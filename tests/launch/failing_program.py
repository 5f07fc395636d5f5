"""One rank ends in the middle of training; the others are in the next step. `failing_program.py FOLDER WAY RANK`."""

import os
import signal
import sys
import time
from pathlib import Path

import tensorflow as tf

import hvdvars as hv


def main(folder: Path, way: str, culprit: int) -> None:
    hv.init()
    mgr, variable = hv.create("horovod"), tf.Variable(tf.zeros([1000]))
    mgr.broadcast([variable])

    @tf.function
    def step():
        mgr.apply_gradients(lambda grads, variables: None, [variable + 1.0], [variable])

    step()
    hv.barrier()
    if hv.rank() == culprit:
        (folder / "failed.txt").write_text(str(time.time()))
        fail(way)
    begun = time.time()
    while time.time() - begun < 100:
        step()
    print("nobody noticed", flush=True)


def fail(way: str) -> None:
    if way == "raise":
        raise ValueError("the first error, on purpose")
    if way == "exit":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
