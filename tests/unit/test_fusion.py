from math import prod

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdvars import fusion
from hvdvars.fusion import cut, fill, pack, plan, plan_owned, unpack

few = settings(max_examples=60, deadline=None)
many = settings(max_examples=120, deadline=None)

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "bool", "complex64")
ALIGNMENT = 64

shapes_of_any_kind = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
    st.integers(1, 200).map(lambda size: (size,)),
    st.sampled_from([(16,), (64, 3), (128,), (1, 1), (0,)]),
)
specs = st.lists(st.tuples(shapes_of_any_kind, st.sampled_from(DTYPES)), max_size=12)


@st.composite
def choices(draw):
    """Arguments of `plan` other than shapes and dtypes."""
    return {
        "kind": draw(st.sampled_from(["packed", "group"])),
        "small_bytes": draw(st.sampled_from([None, -1, 0, 40, 300, 64 * 1024])),
        "max_bytes": draw(st.sampled_from([None, 1, 100, 700])),
        "max_group": draw(st.sampled_from([None, 1, 2, 3])),
    }


def width(dtype):
    return tf.as_dtype(dtype).size


def make(specs):
    """One tensor per (shape, dtype); every element of every tensor has bits of its own as far as the dtype allows."""
    tensors, first = [], 1
    for shape, dtype in specs:
        count = prod(shape)
        numbers = np.arange(first, first + count)
        first += count
        if dtype == "bool":
            numbers = numbers % 2
        if dtype == "complex64":
            numbers = numbers * (1 + 2j)
        tensors.append(tf.cast(tf.reshape(tf.constant(numbers), shape), dtype))
    return tensors


def bits(tensor):
    return np.ascontiguousarray(tensor.numpy()).tobytes()


def columns(specs):
    return [shape for shape, _ in specs], [dtype for _, dtype in specs]


def operations(function, *tensors):
    """Types of the operations in the graph of `function(*tensors)`."""
    graph = tf.function(function, autograph=False).get_concrete_function(*tensors).graph
    return [op.type for op in graph.get_operations() if op.type not in ("Placeholder", "Identity", "Const", "NoOp")]


@few
@given(specs, choices())
def test_what_is_packed_comes_back_bit_by_bit(specs, chosen):
    tensors = make(specs)
    made = plan(*columns(specs), **chosen)
    restored = unpack(made, pack(made, tensors))
    assert len(restored) == len(tensors)
    for before, after in zip(tensors, restored, strict=True):
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert bits(after) == bits(before)


@few
@given(specs, st.data())
def test_what_is_packed_for_owners_comes_back_bit_by_bit(specs, data):
    ranks = data.draw(st.integers(1, 4))
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=len(specs), max_size=len(specs)))
    tensors = make(specs)
    made = plan_owned(*columns(specs), owners, ranks, together=data.draw(st.booleans()))
    restored = unpack(made, pack(made, tensors))
    assert [bits(tensor) for tensor in restored] == [bits(tensor) for tensor in tensors]
    assert [(tensor.dtype, tensor.shape) for tensor in restored] == [(t.dtype, t.shape) for t in tensors]


@many
@given(specs, choices())
def test_a_plan_covers_every_tensor_once_and_keeps_its_limits(specs, chosen):
    shapes, dtypes = columns(specs)
    made = plan(shapes, dtypes, **chosen)
    places = [place for bucket in made.buckets for place in bucket.places]
    assert sorted(place.index for place in [*places, *made.rest]) == list(range(len(specs)))
    assert all(place.size == 0 for place in made.rest) and all(place.size for place in places)
    for bucket in made.buckets:
        small = chosen["small_bytes"]
        assert {dtypes[place.index] for place in bucket.places} == {bucket.dtype}
        assert all(place.shape == shapes[place.index] for place in bucket.places)
        assert bucket.bytes == sum(place.size for place in bucket.places) * width(bucket.dtype)
        if len(bucket.places) == 1:
            assert bucket.kind == "alone"
            continue
        assert bucket.kind == chosen["kind"]
        assert chosen["max_group"] is None or len(bucket.places) <= chosen["max_group"]
        assert chosen["max_bytes"] is None or bucket.bytes <= max(width(bucket.dtype), chosen["max_bytes"])
        assert small is None or all(place.size * width(bucket.dtype) <= small for place in bucket.places)
    assert made.bytes == sum(prod(shape) * width(dtype) for shape, dtype in specs)


@many
@given(specs, choices())
def test_buckets_follow_the_order_of_the_caller(specs, chosen):
    made = plan(*columns(specs), **chosen)
    firsts = [min(place.index for place in bucket.places) for bucket in made.buckets]
    assert firsts == sorted(firsts)
    for dtype in DTYPES:
        runs = [sorted(p.index for p in b.places) for b in made.buckets if b.dtype == dtype and len(b.places) > 1]
        assert all(one[-1] < two[0] for one, two in zip(runs, runs[1:], strict=False))


@many
@given(specs, choices(), st.integers(1, 4))
def test_the_same_question_has_the_same_answer(specs, chosen, ranks):
    shapes, dtypes = columns(specs)
    assert plan(shapes, dtypes, **chosen) == plan(tuple(shapes), tuple(dtypes), **chosen)
    owners = [index % ranks for index in range(len(specs))]
    assert plan_owned(shapes, dtypes, owners, ranks) == plan_owned(list(shapes), list(dtypes), tuple(owners), ranks)
    known = [tf.TensorShape(shape) for shape in shapes]
    assert plan(known, dtypes, **chosen) == plan(shapes, dtypes, **chosen)


@many
@given(specs, choices())
def test_places_lie_side_by_side_and_whole_units_on_the_boundary(specs, chosen):
    for bucket in plan(*columns(specs), **chosen).buckets:
        row = max(1, ALIGNMENT // width(bucket.dtype))
        end = 0
        for place in bucket.places:
            assert place.offset == end
            end += place.size
            assert place.size % row or place.offset % row == 0
        assert end == bucket.size and bucket.parts == ()


@many
@given(specs, st.data())
def test_each_owner_has_one_part_that_begins_on_the_boundary(specs, data):
    ranks = data.draw(st.integers(2, 5))
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=len(specs), max_size=len(specs)))
    shapes, dtypes = columns(specs)
    made = plan_owned(shapes, dtypes, owners, ranks)
    assert len(made.buckets) == len({dtype for shape, dtype in specs if prod(shape)})
    for bucket in made.buckets:
        row = max(1, ALIGNMENT // width(bucket.dtype))
        starts = np.cumsum([0, *bucket.parts])
        assert len(bucket.parts) == ranks and starts[-1] == bucket.size
        for place in bucket.places:
            owner = owners[place.index]
            assert starts[owner] <= place.offset and place.offset + place.size <= starts[owner + 1]
        if len(bucket.places) > 1:
            assert all(start % row == 0 for start in starts)
            # Rounding up is all that is added, and an owner of nothing gets nothing.
            for rank in range(ranks):
                own = sum(place.size for place in bucket.places if owners[place.index] == rank)
                assert bucket.parts[rank] == -(-own // row) * row


@many
@given(specs.filter(bool), st.data())
def test_apart_there_is_a_bucket_for_each_tensor(specs, data):
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(specs), max_size=len(specs)))
    made = plan_owned(*columns(specs), owners, 3, together=False)
    for bucket in made.buckets:
        (place,) = bucket.places
        assert bucket.kind == "alone" and bucket.size == place.size
        assert bucket.parts == tuple(place.size * (rank == owners[place.index]) for rank in range(3))


@few
@given(specs.filter(bool), st.data())
def test_any_range_of_a_buffer_can_be_filled(specs, data):
    ranks = data.draw(st.integers(1, 3))
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=len(specs), max_size=len(specs)))
    shapes, dtypes = columns(specs)
    tensors = make(specs)
    for bucket in plan_owned(shapes, dtypes, owners, ranks).buckets:
        whole = np.zeros(bucket.size, tf.as_dtype(bucket.dtype).as_numpy_dtype)
        for place in bucket.places:
            whole[place.offset : place.offset + place.size] = tensors[place.index].numpy().reshape(-1)
        assert bits(fill(bucket, tensors)) == whole.tobytes()
        start = data.draw(st.integers(0, bucket.size))
        stop = data.draw(st.integers(start, bucket.size))
        part = fill(bucket, tensors, start, stop)
        assert part.shape == (stop - start,) and part.dtype == bucket.dtype
        assert bits(part) == whole[start:stop].tobytes()


@few
@given(specs.filter(bool), st.data())
def test_an_owner_cuts_its_own_part(specs, data):
    ranks = data.draw(st.integers(2, 3))
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=len(specs), max_size=len(specs)))
    tensors = make(specs)
    for bucket in plan_owned(*columns(specs), owners, ranks).buckets:
        buffer = fill(bucket, tensors)
        starts = np.cumsum([0, *bucket.parts])
        for rank in range(ranks):
            places = [place for place in bucket.places if owners[place.index] == rank]
            pieces = cut(buffer[starts[rank] : starts[rank + 1]], places, int(starts[rank]))
            assert [bits(piece) for piece in pieces] == [bits(tensors[place.index]) for place in places]


def test_a_tensor_alone_is_never_copied():
    specs = [((300, 300), "float32"), ((5,), "float32"), ((400,), "float64"), ((3, 3), "float32")]
    made = plan(*columns(specs), small_bytes=1000)
    kinds = {bucket.places[0].index: bucket.kind for bucket in made.buckets}
    assert kinds == {0: "alone", 1: "packed", 2: "alone"}
    large = [bucket for bucket in made.buckets if bucket.kind == "alone"]
    tensors = make(specs)
    assert set(operations(lambda *given: [fill(bucket, given) for bucket in large], *tensors)) <= {"Reshape"}
    vector = make([((9,), "float32")])
    assert fill(plan([(9,)], ["float32"]).buckets[0], vector) is vector[0]
    buffers = [fill(bucket, tensors) for bucket in large]
    assert set(operations(lambda *given: [cut(b, x.places) for b, x in zip(given, large, strict=True)], *buffers)) <= {
        "Reshape",
        "EnsureShape",
    }


def test_a_group_is_handed_over_as_it_is():
    specs = [((2,), "float32"), ((3, 1), "float32"), ((), "float32")]
    tensors = make(specs)
    made = plan(*columns(specs), kind="group")
    (buffer,) = pack(made, tensors)
    assert all(one is two for one, two in zip(buffer, tensors, strict=True))


def test_one_copy_in_and_one_split_out_for_whole_units():
    specs = [((16 * k,), "float32") for k in range(1, 6)]
    made, tensors = plan(*columns(specs)), make(specs)
    assert operations(lambda *given: pack(made, given), *tensors) == ["ConcatV2"]
    (buffer,) = pack(made, tensors)
    used = operations(lambda given: unpack(made, [given]), buffer)
    assert used.count("SplitV") == 1 and set(used) <= {"SplitV", "Reshape", "EnsureShape", "StridedSlice"}


def test_small_tensors_share_and_large_ones_do_not():
    shapes = [(fusion.SMALL_BYTES // 4,), (fusion.SMALL_BYTES // 4 + 1,), (3,)]
    made = plan(shapes, ["float32"] * 3)
    assert [[place.index for place in bucket.places] for bucket in made.buckets] == [[0, 2], [1]]


def test_no_tensors_need_no_buckets():
    empty = plan([], [])
    assert empty.buckets == () and empty.bytes == 0 and unpack(empty, pack(empty, [])) == []
    only_empty = plan([(0, 3), (2, 0)], ["float32", "bool"])
    assert only_empty.buckets == ()
    assert [(t.shape, t.dtype) for t in unpack(only_empty, [])] == [((0, 3), tf.float32), ((2, 0), tf.bool)]
    assert cut(tf.zeros([4]), []) == []


@pytest.mark.parametrize("make_plan", [plan, lambda shapes, dtypes: plan_owned(shapes, dtypes, [0] * len(shapes), 2)])
def test_wrong_lists_are_refused(make_plan):
    with pytest.raises(ValueError, match="2 shapes and 1 dtypes"):
        make_plan([(1,), (2,)], ["float32"])
    with pytest.raises(ValueError, match=r"shapes\[1\].*every dimension must be known"):
        make_plan([(1,), (None, 2)], ["float32", "float32"])
