import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdvars.placement import balance, place, split_evenly

fast = settings(max_examples=200, deadline=None)
byte_sizes = st.lists(st.integers(0, 10**9), max_size=60)
rank_counts = st.integers(1, 17)


@fast
@given(byte_sizes, rank_counts)
def test_every_variable_has_one_owner_and_no_byte_is_lost(sizes, ranks):
    owners = place(sizes, ranks)
    assert len(owners) == len(sizes) and all(0 <= owner < ranks for owner in owners)
    loads = balance(owners, sizes, ranks)
    assert len(loads) == ranks and sum(loads) == sum(sizes)
    assert all(loads[rank] == sum(s for s, o in zip(sizes, owners, strict=True) if o == rank) for rank in range(ranks))


@fast
@given(byte_sizes, rank_counts)
def test_the_same_question_has_the_same_answer(sizes, ranks):
    assert place(sizes, ranks) == place(tuple(sizes), ranks) == place(list(sizes), ranks)


@fast
@given(byte_sizes.filter(bool), rank_counts)
def test_no_rank_is_above_the_others_by_more_than_one_variable(sizes, ranks):
    """What the greedy rule promises for any input: the last variable of the fullest rank went to the emptiest."""
    owners = place(sizes, ranks)
    loads = balance(owners, sizes, ranks)
    for rank, load in enumerate(loads):
        own = [size for size, owner in zip(sizes, owners, strict=True) if owner == rank]
        assert not own or load - min(own) <= min(loads)
    assert max(loads) <= sum(sizes) / ranks + max(sizes)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_the_fullest_rank_is_within_four_thirds_of_the_best(sizes, ranks):
    best = min(max(balance(owners, sizes, ranks)) for owners in itertools.product(range(ranks), repeat=len(sizes)))
    fullest = max(balance(place(sizes, ranks), sizes, ranks))
    assert best <= fullest <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9


@given(st.integers(1, 100), st.integers(1, 8), st.integers(1, 6))
def test_equal_variables_are_spread_evenly(size, ranks, each):
    assert balance(place([size] * (ranks * each), ranks), [size] * (ranks * each), ranks) == (size * each,) * ranks


def test_ties_go_to_the_earlier_variable_and_the_lower_rank():
    assert place([4, 8, 8, 4], 2) == (0, 0, 1, 1)
    assert place([5, 5, 5], 3) == (0, 1, 2)
    assert place([], 4) == () and place([7], 1) == (0,) and place([0, 0], 2) == (0, 0)


def test_a_large_variable_leaves_the_small_ones_to_the_others():
    assert balance(place([100, 30, 30, 30], 2), [100, 30, 30, 30], 2) == (100, 90)


@fast
@given(st.integers(0, 10**9), rank_counts)
def test_an_even_split_differs_by_at_most_one(length, ranks):
    parts = split_evenly(length, ranks)
    assert len(parts) == ranks and sum(parts) == length
    assert max(parts) - min(parts) <= 1 and list(parts) == sorted(parts, reverse=True)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: place([1], 0), "at least one rank, got 0"),
        (lambda: place([1, -2], 2), r"sizes\[1\] is -2"),
        (lambda: split_evenly(3, 0), "at least one rank, got 0"),
        (lambda: split_evenly(-3, 2), "-3"),
    ],
)
def test_wrong_questions_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
