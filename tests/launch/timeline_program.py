"""One gradient reduced by each of the algorithms given, on every rank, with Horovod's timeline on.

    timeline_program.py FILE ALGORITHM...

Rank 0 writes the timeline to FILE, and what `report()` says of each algorithm to FILE.reports.
"""

import json
import os
import sys

path, algorithms = sys.argv[1], sys.argv[2:]
os.environ["HOROVOD_TIMELINE"] = path

import tensorflow as tf  # noqa: E402

import hvdvars as hv  # noqa: E402

hv.init()
managers = [hv.create("replicated", all_reduce_spec=text, allow_cpu="nccl" in text) for text in algorithms]
# The first once more: Horovod drops what it has not written when it shuts down.
for mgr in [*managers, managers[0]]:
    mgr.reduce([tf.ones([1001])], [tf.Variable(tf.zeros([1001]))])
if hv.rank() == 0:
    counts = [mgr.report()["plans"][0]["collectives_per_step"] for mgr in managers]
    with open(f"{path}.reports", "w") as file:
        json.dump(dict(zip(algorithms, counts, strict=True)), file)
hv.shutdown()
