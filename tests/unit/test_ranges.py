"""Which range of a spec takes a gradient, and what the buckets of each range are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdvars import fusion, reduce, session, spec
from hvdvars.options import resolve


@pytest.fixture(autouse=True)
def two_ranks():
    session.start(session.World(0, 2, 0, 2, 0, 1, 1, "MPI"))
    yield
    session.stop()


def planned(text, sizes, **options):
    forms = [reduce.Form("dense", (size,), "float32") for size in sizes]
    return reduce.plan_reduction("test", forms, resolve("distributed_all_reduce", all_reduce_spec=text, **options))


def places_of(reduction):
    """For each bucket: its range, and the indices of its tensors."""
    return [
        (index, sorted(place.index for place in bucket.places))
        for bucket, index in zip(reduction.plan.buckets, reduction.range_of, strict=True)
    ]


def test_small_tensors_share_a_bucket_within_their_range_only():
    reduction = planned("pscpu:10:xring#2:100:collective", [5, 50, 10, 11, 101, 100, 1])
    assert places_of(reduction) == [(0, [0, 2, 6]), (1, [1, 3, 5]), (2, [4])]
    assert reduction.collectives == 2 + 2 + 1


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"fusion": "none"}, [(0, [0]), (0, [2]), (1, [1]), (1, [3])]),
        ({"agg_small_grads_max_bytes": 44}, [(0, [0, 2]), (1, [1]), (1, [3])]),
        ({"agg_small_grads_max_bytes": 44, "agg_small_grads_max_group": 1}, [(0, [0]), (0, [2]), (1, [1]), (1, [3])]),
        ({"fusion": "pack"}, [(0, [0, 2]), (1, [1, 3])]),
        ({"gradient_repacking": 3}, [(0, [0, 2]), (1, [1, 3])]),
    ],
)
def test_the_fusion_options_work_inside_each_range(options, wanted):
    reduction = planned("pscpu:10:xring", [5, 20_000, 10, 12], **options)
    assert sorted(places_of(reduction)) == wanted


def test_groups_hold_tensors_of_one_range():
    reduction = planned("xring:10:nccl", [5, 50, 6, 60, 7], allreduce_merge_scope=2)
    assert places_of(reduction) == [(0, [0, 2]), (0, [4]), (1, [1, 3])]
    assert reduction.collectives == 3


def test_the_report_of_the_ranges():
    rows = planned("pscpu#3:10:xring", [5, 50, 0, 60_000]).report_ranges()
    assert rows == [
        {"alg": "pscpu", "runs_as": "pscpu", "shards": 3, "limit": 10, "tensors": 1, "bytes": 20, "collectives": 2},
        {
            "alg": "xring",
            "runs_as": "xring",
            "shards": 1,
            "limit": None,
            "tensors": 2,
            "bytes": 240_200,
            "collectives": 2,
        },
    ]


@given(st.lists(st.integers(0, 300), max_size=12), st.lists(st.integers(1, 300), unique=True, max_size=3))
def test_every_tensor_is_in_the_buckets_of_its_range(sizes, limits):
    text = ":".join([*(part for limit in sorted(limits) for part in ("xring", str(limit))), "pscpu"])
    ranges, reduction = spec.parse(text), planned(text, sizes)
    found = {i: index for index, indices in places_of(reduction) for i in indices}
    assert found == {i: spec.select(ranges, size) for i, size in enumerate(sizes) if size}
    assert sorted([*found, *(place.index for place in reduction.plan.rest)]) == list(range(len(sizes)))
    assert sum(row["bytes"] for row in reduction.report_ranges()) == 4 * sum(sizes)


def test_plans_are_joined_with_their_own_indices():
    parts = [(fusion.plan([[2], [0]], ["float32"] * 2), [3, 0]), (fusion.plan([[5], [1]], ["float64"] * 2), [1, 2])]
    joined = fusion.join(parts)
    assert [[place.index for place in bucket.places] for bucket in joined.buckets] == [[3], [1, 2]]
    assert joined.count == 4 and [place.index for place in joined.rest] == [0]
    assert joined.rest_dtypes == ("float32",)
    with pytest.raises(ValueError, match="3 indices for a plan of 2 tensors"):
        fusion.join([(parts[0][0], [0, 1, 2])])
