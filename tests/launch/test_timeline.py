"""Each algorithm of a spec moves data as its name says: Horovod's own timeline shows it, on two nodes of two ranks."""

import json
import sys
from pathlib import Path

import launchers
import pytest
from launchers import Launch

PROGRAM = Path(__file__).with_name("timeline_program.py")
# What ends in these names is sent by the ranks of a node among each other, or across nodes.
WANTED = {
    "xring": {"": "ALLREDUCE"},
    "xring#2": {".0": "ALLREDUCE", ".1": "ALLREDUCE"},
    "collective#2": {"_1of2": "ALLREDUCE", "_2of2": "ALLREDUCE"},
    "pscpu#3": {".shards": "ALLTOALL", ".whole": "ALLGATHER"},
    "nccl/xring": {".node.shards": "ALLTOALL", ".across": "ALLREDUCE", ".node.whole": "ALLGATHER"},
    "nccl/rechd": {
        ".node.shards": "ALLTOALL",
        ".across.0": "ALLTOALL",
        ".across.1": "ALLTOALL",
        ".node.whole": "ALLGATHER",
    },
    "nccl/pscpu": {
        ".node.shards": "ALLTOALL",
        ".across.shards": "ALLTOALL",
        ".across.whole": "ALLGATHER",
        ".node.whole": "ALLGATHER",
    },
    "pscpu/pscpu#2": {
        ".node.shards": "ALLTOALL",
        ".across.shards": "ALLTOALL",
        ".across.whole": "ALLGATHER",
        ".node.whole": "ALLGATHER",
    },
}


def sent(path):
    """Of each tensor that Horovod sent, its name: the collective."""
    events = json.loads(path.read_text())
    names = {one["pid"]: one["args"].get("name") for one in events if one.get("name") == "process_name"}
    kinds = ("ALLREDUCE", "ALLTOALL", "ALLGATHER", "REDUCESCATTER", "BROADCAST")
    return {names[one["pid"]]: one["name"] for one in events if one["ph"] == "B" and one["name"] in kinds}


@pytest.fixture(scope="module")
def timeline(tmp_path_factory):
    path = tmp_path_factory.mktemp("timeline") / "timeline.json"
    program = [sys.executable, str(PROGRAM), str(path), *WANTED]
    ended = launchers.run(Launch("2+2", 4), program, path.with_suffix(".txt"), 180)
    assert ended.code == 0, ended.tail()
    return sent(path), json.loads(Path(f"{path}.reports").read_text())


@pytest.mark.parametrize("text", WANTED)
def test_the_timeline_shows_the_collectives_of(timeline, text):
    tensors, reported = timeline
    start = f"hvdvars.{list(WANTED).index(text)}.0.0"
    found = {name.removeprefix(start): kind for name, kind in tensors.items() if name.startswith(start)}
    assert found == WANTED[text]
    # Horovod counts a group as one, its timeline shows each member.
    assert reported[text] == (1 if text.startswith("collective") else len(found))
