import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdvars.options import MODES, OPTION_TABLE, RULES, Options, resolve

OWNERS = ["parameter_server", "distributed_replicated"]
REQUIRED = {"distributed_all_reduce": {"all_reduce_spec": "pscpu:32K:xring"}}
NAMES = [field.name for field in fields(Options)]
DEFAULTS = Options()


def other_values(name):
    """Values of the right type that are not the default."""
    rule = RULES[name]
    if name == "all_reduce_spec":
        return st.just("collective#2")
    if rule.choices:
        return st.sampled_from([choice for choice in rule.choices if choice != getattr(DEFAULTS, name)])
    if rule.kind is bool:
        return st.just(not getattr(DEFAULTS, name))
    if rule.kind is int:
        return st.integers(1, 10**9)
    return st.floats(0.001, 1e6).filter(lambda value: value != getattr(DEFAULTS, name))


def test_the_table_covers_every_option_and_mode():
    assert list(OPTION_TABLE) == NAMES == list(RULES)
    assert all(tuple(row) == MODES for row in OPTION_TABLE.values())
    assert all(reason is None or reason for row in OPTION_TABLE.values() for reason in row.values())


@pytest.mark.parametrize("mode", MODES)
def test_defaults(mode):
    required = REQUIRED.get(mode, {})
    given = {"all_reduce_spec": "collective"} if mode == "collective_all_reduce" else required
    assert asdict(resolve(mode, **required)) == {**asdict(DEFAULTS), **given}
    assert resolve(mode, **{**dict.fromkeys(NAMES), **required}) == resolve(mode, **required)
    assert resolve(mode, **{**asdict(DEFAULTS), **required}) == resolve(mode, **required)
    json.dumps(asdict(resolve(mode, **required)))


@given(st.sampled_from(MODES), st.sampled_from(NAMES), st.data())
def test_valid_or_refused_as_the_table_says(mode, name, data):
    value = data.draw(other_values(name))
    options = {**REQUIRED.get(mode, {}), name: value}
    if name == "agg_small_grads_max_group":
        options["agg_small_grads_max_bytes"] = 1024
    if name == "allow_cpu" and OPTION_TABLE[name][mode] is None:
        options["all_reduce_spec"] = "nccl"
    if mode in REQUIRED and (name == "allreduce_merge_scope" or value == "group"):
        options["all_reduce_spec"] = "xring:32K:nccl"
    if name.startswith("fp16_"):
        options |= {"use_fp16": True, "fp16_enable_auto_loss_scale": True, name: value}
    if name == "local_parameter_device" and mode == "parameter_server":
        options["staged_vars"] = True
    if name == "hierarchical_copy":
        options["local_towers"] = 4
    reason = OPTION_TABLE[name][mode]
    if mode in OWNERS and (name, value) == ("fusion", "group"):
        reason = "no groups for all-to-all"
    if reason is None:
        assert getattr(resolve(mode, **options), name) == value
        return
    with pytest.raises(ValueError) as caught:
        resolve(mode, **options)
    assert f"create({mode!r})" in str(caught.value)
    if name != "agg_small_grads_max_group":
        assert name in str(caught.value) and repr(value) in str(caught.value) and reason in str(caught.value)


def test_rows_of_sparse_gradients_cannot_be_cut():
    with pytest.raises(ValueError, match="rows cannot be cut"):
        resolve("parameter_server", placement="elements", sparse="sparse")
    assert resolve("parameter_server", placement="elements", sparse="dense").sparse == "dense"


def test_the_modes_that_hold_an_option():
    def valid(name):
        return [mode for mode in MODES if OPTION_TABLE[name][mode] is None]

    all_reduce = ["replicated", "distributed_all_reduce", "collective_all_reduce", "horovod"]
    assert valid("all_reduce_spec") == ["replicated", "distributed_all_reduce", "collective_all_reduce"]
    assert valid("placement") == valid("staged_vars") == ["parameter_server"]
    assert valid("reduce_to_owner") == valid("local_parameter_device") == OWNERS
    assert valid("copy_dtype") == ["distributed_replicated"]
    assert valid("gradient_repacking") == valid("compact_gradient_transfer") == all_reduce
    assert valid("agg_small_grads_max_bytes") == valid("allreduce_merge_scope") == all_reduce
    assert valid("hierarchical_copy") == ["replicated"] and valid("stall_seconds") == []
    assert valid("variable_consistency") == all_reduce
    assert valid("average") == valid("fusion") == [*all_reduce, *OWNERS]
    assert valid("gradient_clip") == valid("use_fp16") == valid("fp16_enable_auto_loss_scale") == list(MODES)


def test_two_halves_need_towers():
    with pytest.raises(ValueError, match="local_towers"):
        resolve("replicated", hierarchical_copy=True)
    assert resolve("replicated", hierarchical_copy=True, local_towers=4).hierarchical_copy


def test_options_of_masters():
    assert resolve("parameter_server", staged_vars=True, placement="elements").staged_vars
    assert resolve("parameter_server", staged_vars=True, local_parameter_device="gpu").local_parameter_device == "gpu"
    chosen = resolve("distributed_replicated", copy_dtype="bfloat16", local_parameter_device="gpu")
    assert (chosen.copy_dtype, chosen.local_parameter_device) == ("bfloat16", "gpu")
    for mode, options, fragment in [
        ("distributed_replicated", {"placement": "elements"}, "use parameter_server"),
        ("distributed_replicated", {"staged_vars": True}, "use parameter_server"),
        ("distributed_replicated", {"compact_gradient_transfer": True}, "belongs to the all-reduce modes"),
        ("distributed_replicated", {"variable_consistency": "relaxed"}, "use horovod"),
        ("distributed_replicated", {"copy_dtype": "float32"}, "'float16', 'bfloat16'"),
        ("parameter_server", {"copy_dtype": "float16", "staged_vars": True}, "only distributed_replicated"),
        ("parameter_server", {"staged_vars": True, "variable_consistency": "relaxed"}, "use horovod"),
        ("horovod", {"copy_dtype": "float16"}, "only distributed_replicated"),
        ("replicated", {"local_parameter_device": "gpu"}, "no single owner"),
    ]:
        with pytest.raises(ValueError, match=rf"create\('{mode}'\)") as caught:
            resolve(mode, **options)
        assert fragment in str(caught.value)


def test_distributed_all_reduce_needs_a_spec_and_checks_each_range():
    mode = "distributed_all_reduce"
    for text in ("xring", "pscpu#2:4K:xring#3", "collective:1:psgpu:2G:nccl"):
        assert resolve(mode, all_reduce_spec=text).all_reduce_spec == text
    for options, fragment in [
        ({}, "all_reduce_spec is required"),
        ({"all_reduce_spec": "xring:4K:nccl#2"}, "drop '#2'"),
        ({"all_reduce_spec": "xring:4K:pscpu", "fusion": "group"}, "Horovod groups"),
        ({"all_reduce_spec": "xring#2:4K:nccl", "allreduce_merge_scope": 2}, "Horovod groups"),
        ({"all_reduce_spec": "xring:4K:pscpu#2", "gradient_repacking": 2}, "in how many pieces"),
        ({"all_reduce_spec": "xring:4K:xring", "placement": "elements"}, "no single owner"),
    ]:
        with pytest.raises(ValueError, match=mode) as caught:
            resolve(mode, **options)
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"copy_dtype": "float16"}, "only distributed_replicated"),
        ({"compact_gradient_transfer": True}, "belongs to the all-reduce modes"),
        ({"variable_consistency": "relaxed"}, "use horovod"),
        ({"fp16_loss_scale": 128}, "no effect without use_fp16"),
        ({"fp16_enable_auto_loss_scale": True}, "no effect without use_fp16"),
        ({"fp16_inc_loss_scale_every_n": 5, "use_fp16": True}, "no effect without fp16_enable_auto_loss_scale"),
        ({"hierarchical_copy": True}, "two halves"),
        ({"local_parameter_device": "gpu"}, "staged_vars=True and distributed_replicated"),
        ({"gradient_repacking": 2}, "fusion="),
        ({"all_reduce_spec": "xring"}, "reduce_to_owner="),
        ({"reduce_to_owner": "ring"}, "'all_to_all', 'reduce_scatter', 'all_reduce'"),
        ({"placement": "element"}, "did you mean 'elements'"),
        ({"gradient_clip": 0.0}, "more than 0"),
        ({"gradient_clip": float("nan")}, "finite"),
        ({"stall_seconds": -1}, "at least 0"),
        ({"verify_every": -1}, "at least 0"),
    ],
)
def test_refused_in_parameter_server(options, fragment):
    with pytest.raises(ValueError, match="create") as caught:
        resolve("parameter_server", **options)
    assert fragment in str(caught.value) and next(iter(options)) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"average": 1}, TypeError),
        ({"average": "yes"}, TypeError),
        ({"verify_every": True}, TypeError),
        ({"verify_every": 2.0}, TypeError),
        ({"verify_every": "2"}, TypeError),
        ({"gradient_clip": "1"}, TypeError),
        ({"gradient_clip": False}, TypeError),
        ({"fusion": 1}, TypeError),
        ({"fusion": "Pack"}, ValueError),
        ({"gradient_repacking": -1}, ValueError),
        ({"allreduce_merge_scope": 0}, ValueError),
    ],
)
def test_wrong_types_and_values(options, error):
    with pytest.raises(error, match=next(iter(options))):
        resolve("horovod", **options)


def test_unknown_names_get_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'parameter_server'.*independent"):
        resolve("parameter_sever")
    with pytest.raises(TypeError, match="unknown option 'fuson'; did you mean 'fusion'"):
        resolve("horovod", fuson="pack")
    with pytest.raises(TypeError, match="mode must be"):
        resolve(None)


def test_two_ways_to_choose_buckets_contradict():
    ways = {
        "fusion": "pack",
        "agg_small_grads_max_bytes": 100,
        "gradient_repacking": 2,
        "allreduce_merge_scope": 3,
    }
    for first in ways:
        for second in ways:
            if first != second:
                with pytest.raises(ValueError, match="contradict"):
                    resolve("horovod", **{first: ways[first], second: ways[second]})
    assert resolve("horovod", fusion="auto", gradient_repacking=2).gradient_repacking == 2
    assert resolve("horovod", fusion="pack", gradient_repacking=0).gradient_repacking is None
    with pytest.raises(ValueError, match="agg_small_grads_max_bytes"):
        resolve("horovod", agg_small_grads_max_group=4)


def test_defaults_of_the_loss_scale():
    constant = resolve("horovod", use_fp16=True)
    assert (constant.fp16_loss_scale, constant.fp16_inc_loss_scale_every_n) == (128.0, None)
    auto = resolve("horovod", use_fp16=True, fp16_enable_auto_loss_scale=True)
    assert (auto.fp16_loss_scale, auto.fp16_inc_loss_scale_every_n) == (128.0, 1000)


def test_all_reduce_spec():
    assert resolve("replicated", all_reduce_spec="pscpu#3").all_reduce_spec == "pscpu#3"
    assert resolve("replicated", all_reduce_spec="pscpu/pscpu#2").all_reduce_spec == "pscpu/pscpu#2"
    assert resolve("replicated", all_reduce_spec="nccl/rechd", allow_cpu=True).allow_cpu
    assert resolve("replicated", all_reduce_spec="nccl").all_reduce_spec == "nccl"
    assert resolve("collective_all_reduce", all_reduce_spec="collective#2").all_reduce_spec == "collective#2"
    for mode, text, fragment in [
        ("replicated", "xring:4K:nccl", "hybrid"),
        ("replicated", "xrng", "did you mean 'xring'"),
        ("replicated", "", "empty"),
        ("replicated", "nccl#2", "drop '#2'"),
        ("replicated", "nccl/rechd#2", "drop '#2'"),
        ("collective_all_reduce", "xring", "collective#k"),
        ("collective_all_reduce", "collective:1M:collective", "one range"),
    ]:
        with pytest.raises(ValueError, match="all_reduce_spec") as caught:
            resolve(mode, all_reduce_spec=text)
        assert fragment in str(caught.value) and repr(text) in str(caught.value)


def test_what_contradicts_an_algorithm():
    for options, fragment in [
        ({"all_reduce_spec": "xring", "allow_cpu": True}, "no effect without an nccl algorithm"),
        ({"allow_cpu": True}, "no effect without an nccl algorithm"),
        ({"all_reduce_spec": "pscpu/pscpu", "horovod_device": "gpu"}, "use psgpu"),
        ({"all_reduce_spec": "nccl/xring", "fusion": "group"}, "Horovod groups"),
        ({"all_reduce_spec": "nccl/pscpu", "gradient_repacking": 2}, "leave out gradient_repacking"),
    ]:
        with pytest.raises(ValueError, match=r"create\('replicated'\)") as caught:
            resolve("replicated", **options)
        assert fragment in str(caught.value)
    assert resolve("replicated", all_reduce_spec="pscpu/pscpu", gradient_repacking=2).gradient_repacking == 2


def test_numpy_values_become_plain():
    options = resolve("horovod", verify_every=np.int64(3), gradient_clip=np.float32(0.5), average=np.bool_(False))
    assert (options.verify_every, options.gradient_clip, options.average) == (3, 0.5, False)
    json.dumps(asdict(options))


def test_options_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        resolve("horovod").fusion = "none"


def test_a_wrong_option_is_refused_without_tensorflow():
    code = (
        "import sys\nfrom hvdvars.options import resolve\n"
        "try: resolve('horovod', placement='elements')\n"
        "except ValueError as error: print(error)\n"
        "print(sorted({'tensorflow', 'horovod', 'mpi4py', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert "placement='elements' is refused" in out[0] and out[1] == "[]"
