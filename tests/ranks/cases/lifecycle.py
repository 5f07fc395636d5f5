"""Before `init`, `init` itself, and who is who."""

import json

import tensorflow as tf

import hvdvars as hv

from . import EVERYWHERE, case
from .tools import raised


@case(before_init=True, hows=EVERYWHERE)
def before_init_every_function_says_what_to_do(world):
    variable = tf.constant([1.0])
    early = {
        "rank": hv.rank,
        "size": hv.size,
        "local_rank": hv.local_rank,
        "local_size": hv.local_size,
        "cross_rank": hv.cross_rank,
        "cross_size": hv.cross_size,
        "barrier": hv.barrier,
        "create": lambda: hv.create("horovod"),
        "verify": lambda: hv.verify([variable]),
    }
    for name, call in early.items():
        error = raised(RuntimeError, call)
        assert f"hvdvars.{name} was called before hvdvars.init()" in error, error
    assert not hv.is_initialized()


@case(hows=EVERYWHERE)
def a_second_init_changes_nothing(world):
    before = hv.rank(), hv.size(), hv.local_rank()
    hv.init()
    assert (hv.rank(), hv.size(), hv.local_rank()) == before
    assert hv.is_initialized()


@case(hows=EVERYWHERE)
def every_rank_has_a_place_of_its_own(world):
    place = [hv.rank(), hv.size(), hv.local_rank(), hv.local_size(), hv.cross_rank(), hv.cross_size()]
    wanted = [[rank, world.size, rank, world.size, 0, 1] for rank in world.ranks]
    assert world.meeting.gather_objects(place, "places") == wanted
    hv.barrier()


@case(hows=EVERYWHERE)
def the_launcher_decides_the_transport(world):
    transport = hv.create("horovod").report()["world"]["transport"]
    assert transport == ("Gloo" if world.how == "gloo" else "MPI")


@case(hows=EVERYWHERE)
def objects_come_from_all_ranks_in_rank_order(world):
    mine = {"rank": world.rank, "text": "ä" * 1000 * world.rank, "list": [None, True, 1.5]}
    gathered = world.meeting.gather_objects(mine, "objects")
    assert gathered == [{**mine, "rank": rank, "text": "ä" * 1000 * rank} for rank in world.ranks]
    assert json.loads(json.dumps(gathered)) == gathered
    assert world.meeting.gather_objects([], "nothing") == [[]] * world.size
