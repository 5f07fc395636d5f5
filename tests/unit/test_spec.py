import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdvars import spec
from hvdvars.spec import Range, parse, select, unparse

UNITS = {"": 1, "k": 2**10, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
heads = st.tuples(st.sampled_from(spec.ALGORITHMS), st.integers(1, 64))


@st.composite
def ranges(draw):
    limits = sorted(draw(st.sets(st.integers(1, 2**44), max_size=4)))
    parts = draw(st.lists(heads, min_size=len(limits) + 1, max_size=len(limits) + 1))
    return tuple(Range(alg, k, limit) for (alg, k), limit in zip(parts, [*limits, None], strict=True))


def refused(text, *fragments):
    with pytest.raises(ValueError) as caught:
        parse(text)
    message = str(caught.value)
    assert repr(text) in message
    for fragment in fragments:
        assert fragment in message, message


@given(ranges())
def test_round_trip(wanted):
    assert parse(unparse(wanted)) == wanted


@given(ranges(), st.integers(0, 2**45))
def test_select_takes_the_first_range_that_is_large_enough(parts, elements):
    index = select(parts, elements)
    assert parts[index].limit is None or elements <= parts[index].limit
    assert all(part.limit < elements for part in parts[:index])


def test_select_at_the_limit():
    parts = parse("pscpu:4K:xring#2:1M:nccl")
    assert [select(parts, n) for n in (0, 4096, 4097, 2**20, 2**20 + 1)] == [0, 0, 1, 1, 2]


def test_select_needs_a_last_range_without_limit():
    with pytest.raises(ValueError, match="9 elements"):
        select([Range("xring", 1, 4)], 9)


def test_known_specs():
    assert parse("xring") == (Range("xring"),)
    assert parse("collective#4") == (Range("collective", 4),)
    assert parse("pscpu/pscpu#2:64k:nccl/rechd") == (Range("pscpu/pscpu", 2, 65536), Range("nccl/rechd"))


@pytest.mark.parametrize("unit", UNITS)
def test_units_are_1024_based(unit):
    assert parse(f"nccl:3{unit}:xring")[0].limit == 3 * UNITS[unit]


@given(ranges(), st.data())
def test_every_mutilated_spec_is_refused_and_quoted(wanted, data):
    parts = unparse(wanted).split(":")
    at = data.draw(st.integers(0, len(parts) - 1), label="part")
    bad = data.draw(
        st.sampled_from(
            [
                "",
                " ",
                "-1",
                "0",
                "1.5",
                "ring",
                "xring#",
                "xring#0",
                "xring#-1",
                "xring#a",
                "xring#1.0",
                "#2",
                "xring#1#2",
                "4KB",
                "4m",
                "K",
                "٣",
                "1e3",
                " 4",
                "+4",
            ]
        )
    )
    parts[at] = bad
    text = ":".join(parts)
    refused(text)
    if text:
        refused(text, repr(bad), f"part {at + 1}")


@given(ranges().filter(lambda parts: len(parts) > 1), st.data())
def test_cut_or_unordered_specs_are_refused(wanted, data):
    text = unparse(wanted)
    cut = text.rsplit(":", 1)[0]
    refused(cut, "followed by")
    refused(text + ":", "followed by")
    lower = data.draw(st.integers(1, wanted[-2].limit), label="limit that does not ascend")
    refused(f"{text}:{lower}:xring", "ascend")


@given(st.text(alphabet="xringcpus#:/0123456789KMGT", max_size=30))
def test_parse_gives_ranges_or_a_value_error_that_quotes(text):
    try:
        parts = parse(text)
    except ValueError as error:
        assert repr(text) in str(error)
    else:
        assert parse(unparse(parts)) == parts
        assert all(part.shards >= 1 for part in parts)


def test_messages_point_at_the_part():
    refused("xring:4K:rings", "part 3 'rings'", "column 10", "did you mean 'xring'")
    refused("xring#0:4K:nccl", "part 1 'xring#0'", "at least 1")
    refused("", "empty")
    refused("xring#" + "9" * 5000, "integer")


@pytest.mark.parametrize("value", [None, 3, b"xring", ["xring"]])
def test_other_types(value):
    with pytest.raises(TypeError, match="all_reduce_spec"):
        parse(value)
