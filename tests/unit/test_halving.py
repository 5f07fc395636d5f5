"""The schedule of recursive halving-doubling, played with lists instead of ranks; and which ranks share a node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdvars.halving import schedule
from hvdvars.layout import arrange

MEMBERS = st.integers(1, 13)
LENGTHS = st.integers(0, 40)


def play(members, length):
    """What each member holds at the end, where member m begins with (m + 1) * (element + 1)."""
    steps = [schedule(member, members, length) for member in range(members)]
    held = [{i: (member + 1) * (i + 1) for i in range(length)} for member in range(members)]
    for now in zip(*steps, strict=True):
        sent = [[held[member][i] for i in range(*step.sent)] for member, step in enumerate(now)]
        for member, step in enumerate(now):
            values = sent[step.partner] if step.partner is not None else []
            arrived = dict(zip(range(*step.received), values, strict=True))
            if step.adds:
                held[member] = {i: held[member][i] + arrived[i] for i in range(*step.kept)}
            else:
                assert not set(arrived) & set(held[member])
                held[member] |= arrived
            assert sorted(held[member]) == list(range(*step.kept))
    return held


@given(MEMBERS, LENGTHS)
def test_every_member_ends_with_the_sum(members, length):
    total = members * (members + 1) // 2
    assert play(members, length) == [{i: total * (i + 1) for i in range(length)}] * members


@given(MEMBERS, LENGTHS)
def test_partners_expect_what_is_sent(members, length):
    for now in zip(*(schedule(member, members, length) for member in range(members)), strict=True):
        for member, step in enumerate(now):
            if step.partner is None:
                assert step.sent[0] == step.sent[1] and step.received[0] == step.received[1]
            else:
                assert now[step.partner].partner == member
                assert now[step.partner].sent == step.received or step.received == (0, 0)


@pytest.mark.parametrize(("members", "steps"), [(1, 0), (2, 2), (3, 4), (4, 4), (5, 6), (8, 6), (13, 8)])
def test_the_number_of_steps(members, steps):
    assert {len(schedule(member, members, 10)) for member in range(members)} == {steps}


@given(st.sampled_from([2, 4, 8, 16]), st.integers(1, 8))
def test_powers_of_two_send_no_more_than_a_ring(members, rows):
    length = rows * members
    for member in range(members):
        sent = sum(step.sent[1] - step.sent[0] for step in schedule(member, members, length))
        assert sent == 2 * (length - rows)


def test_wrong_members_are_refused():
    for member, members, length in [(-1, 2, 3), (2, 2, 3), (0, 0, 3), (0, 1, -1)]:
        with pytest.raises(ValueError, match="halving.schedule"):
            schedule(member, members, length)


def test_nodes_come_in_the_order_of_their_first_ranks():
    found = arrange(["b", "a", "b", "a"])
    assert found.nodes == ((0, 2), (1, 3)) and found.even and found.across == ((0, 1), (2, 3))
    assert arrange(["a"]).across == ((0,),)
    assert arrange(["a", "b", "b", "a"]).across == ((0, 1), (2, 3))


def test_nodes_of_different_sizes_have_no_counterparts():
    found = arrange(["a", "a", "a", "b", "b"])
    assert found.nodes == ((0, 1, 2), (3, 4)) and not found.even and found.across == ()


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_every_rank_is_on_one_node_and_in_one_group_across(hosts):
    found = arrange(hosts)
    assert sorted(rank for node in found.nodes for rank in node) == list(range(len(hosts)))
    if found.even:
        assert sorted(rank for group in found.across for rank in group) == list(range(len(hosts)))
        assert all(len(set(node) & set(group)) == 1 for node in found.nodes for group in found.across)
