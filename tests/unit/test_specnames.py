import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdvars import spec
from hvdvars.specnames import (
    AllReduceSpecTuple,
    build_all_reduce_device_prefixes,
    collective_group_key,
    contains_any,
    group_device_names,
    parse_all_reduce_spec,
    parse_general_int,
    split_grads_by_size,
)

fast = settings(max_examples=200, deadline=None)
units = st.sampled_from(list(spec._UNITS.items()))


@st.composite
def ranges(draw):
    limits = sorted(draw(st.sets(st.integers(1, 2**44), max_size=4)))
    heads = st.tuples(st.sampled_from(spec.ALGORITHMS), st.integers(1, 64))
    parts = draw(st.lists(heads, min_size=len(limits) + 1, max_size=len(limits) + 1))
    return tuple(spec.Range(alg, k, limit) for (alg, k), limit in zip(parts, [*limits, None], strict=True))


@fast
@given(st.integers(0, 10**6), units)
def test_integers_have_units_of_1024(number, unit):
    name, factor = unit
    assert parse_general_int(f"{number}{name}") == number * factor


@pytest.mark.parametrize("text", ["", " 1", "1.5", "K", "4KB", "-1K", "4m", "+4", "1_0", "٣", "9" * 5000])
def test_other_integers_are_refused(text):
    with pytest.raises(ValueError) as caught:
        parse_general_int(text)
    assert "parse_general_int" in str(caught.value) and repr(text) in str(caught.value)


def test_integers_by_hand():
    assert [parse_general_int(text) for text in ("-1", "32k", "1T")] == [-1, 32768, 2**40]
    with pytest.raises(TypeError, match="parse_general_int.*3 .int."):
        parse_general_int(3)


@fast
@given(ranges())
def test_specs_are_those_of_the_grammar(parts):
    tuples = parse_all_reduce_spec(spec.unparse(parts))
    assert isinstance(tuples, list) and tuples[-1].limit == -1
    assert tuples == [(part.alg, part.shards, -1 if part.limit is None else part.limit) for part in parts]


def test_specs_by_hand():
    assert parse_all_reduce_spec("pscpu:2k:pscpu#2:64k:xring") == [
        AllReduceSpecTuple(alg="pscpu", shards=1, limit=2048),
        AllReduceSpecTuple(alg="pscpu", shards=2, limit=65536),
        AllReduceSpecTuple(alg="xring", shards=1, limit=-1),
    ]
    assert parse_all_reduce_spec("pscpu/pscpu#2") == [("pscpu/pscpu", 2, -1)]


@pytest.mark.parametrize(
    "text", ["", "ring", "xring#x", "xring#0", "xring:4k", "xring:four:nccl", "a:1:xring", "xring:8:nccl:4:xring"]
)
def test_bad_specs_are_quoted(text):
    with pytest.raises(ValueError) as caught:
        parse_all_reduce_spec(text)
    assert repr(text) in str(caught.value)


def test_device_prefixes():
    assert build_all_reduce_device_prefixes("worker", 2) == ["/job:worker/task:0", "/job:worker/task:1"]
    assert build_all_reduce_device_prefixes("ps", 0) == []
    assert build_all_reduce_device_prefixes("localhost", 1) == ["/job:localhost"]
    with pytest.raises(ValueError, match="one task, got num_tasks=2"):
        build_all_reduce_device_prefixes("localhost", 2)


@fast
@given(st.integers(1, 20), st.data())
def test_groups_have_one_size_and_every_device(count, data):
    size = data.draw(st.integers(1, count), label="group_size")
    devices = [f"/gpu:{index}" for index in range(count)]
    groups = group_device_names(devices, size)
    assert all(len(group) == size for group in groups) and len(groups) == -(-count // size)
    names = [name for group in groups for name in group]
    assert set(names) == set(devices)
    assert max(map(names.count, devices)) <= (1 if count % size == 0 else 2)


def test_groups_by_hand():
    assert group_device_names(list("abcd"), 2) == [["a", "c"], ["b", "d"]]
    assert group_device_names(list("abc"), 2) == [["a", "c"], ["b", "a"]]
    assert group_device_names(list("abc"), 1) == [["a"], ["b"], ["c"]]
    for size in (0, 4):
        with pytest.raises(ValueError, match=f"from 1 to 3, got {size}"):
            group_device_names(list("abc"), size)


def test_gradients_by_size():
    with tf.Graph().as_default():
        two, four = tf.zeros([2]), tf.zeros([2, 2])
        small, large = split_grads_by_size(3, [[(two, "a"), (four, "b")], [(four, "c")], []])
        assert small == [[[two, "a"]]] and large == [[[four, "b"]], [[four, "c"]]]
        assert split_grads_by_size(4, [[(two, "a"), (four, "b")]]) == ([[[two, "a"], [four, "b"]]], [])
        unknown = tf.compat.v1.placeholder(tf.float32, [None])
        for grad in (None, unknown):
            with pytest.raises(ValueError, match="split_grads_by_size: gradient 1 of device 0"):
                split_grads_by_size(4, [[(two, "a"), (grad, "b")]])


def test_group_keys_are_those_of_sets():
    gpus = [f"/job:worker/replica:0/task:0/device:GPU:{index}" for index in (1, 0, 3)]
    key = collective_group_key(gpus)
    assert isinstance(key, int) and key >= 1
    assert key == collective_group_key(gpus) == collective_group_key(reversed(gpus))
    assert key == collective_group_key([name.replace("task:0", "task:1") for name in gpus])
    others = [
        collective_group_key(names) for names in (gpus[:2], ["/gpu:0", "/gpu:4"], ["/cpu:0", "/cpu:1"], ["/gpu:13"])
    ]
    assert len({key, *others}) == 5
    assert collective_group_key(["/gpu:1", "/gpu:0"]) == others[0]
    for name in ("/job:worker/task:0", "/device:GPU:*"):
        with pytest.raises(ValueError, match="collective_group_key: expected names such as"):
            collective_group_key(["/gpu:0", name])


def test_needles():
    assert contains_any("nccl/pscpu", ["psgpu", "pscpu"]) and contains_any("x", [""])
    assert not contains_any("nccl/xring", ["psgpu", "pscpu"]) and not contains_any("x", [])
