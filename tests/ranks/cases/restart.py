"""The last of all: leave the world, and join it again."""

import tensorflow as tf

import hvdvars as hv

from . import case
from .tools import close, raised, sum_of_ranks


@case(hows=("mpi",))
def the_world_can_be_left_and_joined_again(world):
    place = hv.rank(), hv.size()
    hv.barrier()
    hv.shutdown()
    assert not hv.is_initialized()
    for early in (hv.rank, hv.barrier, lambda: hv.create("horovod"), lambda: hv.verify([])):
        assert "hvdvars.init()" in raised(RuntimeError, early)
    hv.init()
    assert (hv.rank(), hv.size()) == place
    variable = tf.Variable([0.0])
    for mode, spec in [("horovod", None), ("replicated", "pscpu/pscpu")]:
        mgr = hv.create(mode, all_reduce_spec=spec, average=False)
        close(mgr.reduce([tf.constant([world.rank + 1.0])], [variable])[0], [sum_of_ranks(world.size)])
