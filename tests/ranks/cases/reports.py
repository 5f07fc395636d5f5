"""`report()`: plain data, and true, as the graph itself says."""

import json

import keras
import tensorflow as tf

import hvdvars as hv

from . import case, widely
from .tools import horovod_operations, same_everywhere

AUTO = {"use_fp16": True, "fp16_enable_auto_loss_scale": True}
MODES = {
    "horovod": ("horovod", {}),
    "pack": ("horovod", {"fusion": "pack"}),
    "group": ("horovod", {"fusion": "group"}),
    "none": ("horovod", {"fusion": "none"}),
    "small": ("horovod", {"agg_small_grads_max_bytes": 100, "agg_small_grads_max_group": 2}),
    "repacking": ("replicated", {"gradient_repacking": 3}),
    "scope": ("replicated", {"allreduce_merge_scope": 3}),
    "compact": ("horovod", {"compact_gradient_transfer": True}),
    "xring2": ("replicated", {"all_reduce_spec": "xring#2"}),
    "pscpu3": ("replicated", {"all_reduce_spec": "pscpu#3"}),
    "hybrid": ("distributed_all_reduce", {"all_reduce_spec": "pscpu#2:8:xring#2:100:collective#3"}),
    "hybrid-none": ("distributed_all_reduce", {"all_reduce_spec": "pscpu#2:8:xring#2", "fusion": "none"}),
    "collective2": ("collective_all_reduce", {"all_reduce_spec": "collective#2"}),
    "sparse": ("horovod", {"sparse": "sparse"}),
    "verify": ("horovod", {"verify_every": 2}),
    **{
        f"{placement}-{way}-{fusion}": (
            "parameter_server",
            {"placement": placement, "reduce_to_owner": way, "fusion": fusion},
        )
        for placement in ("variables", "elements")
        for way, fusion in (("auto", "auto"), ("reduce_scatter", "auto"), ("all_reduce", "none"))
    },
    "owners-sparse": ("parameter_server", {"sparse": "sparse"}),
    "owners-scale": ("parameter_server", AUTO),
    "horovod-relaxed": ("horovod", {"variable_consistency": "relaxed", "sparse": "sparse"}),
    "masters": ("distributed_replicated", {"copy_dtype": "bfloat16"}),
    "masters-none": ("distributed_replicated", {"fusion": "none", "reduce_to_owner": "reduce_scatter"}),
    "staged": ("parameter_server", {"staged_vars": True, "sparse": "sparse", **AUTO}),
    "staged-elements": ("parameter_server", {"staged_vars": True, "placement": "elements"}),
    "independent": ("independent", {}),
}
CLASSES = {
    "horovod": "VariableMgrHorovod",
    "replicated": "VariableMgrLocalReplicated",
    "distributed_all_reduce": "VariableMgrDistributedAllReduce",
    "collective_all_reduce": "VariableMgrCollectiveAllReduce",
    "parameter_server": "VariableMgrLocalFetchFromPS",
    "distributed_replicated": "VariableMgrDistributedReplicated",
    "independent": "VariableMgrIndependent",
}


def traced(mgr, optimizer, double="float64"):
    """A step over variables of two dtypes, a table and one without a gradient, as a concrete function."""
    variables = [tf.Variable(tf.zeros([size])) for size in (10, 3, 20_000, 40, 16, 1)]
    variables += [tf.Variable(tf.zeros([5], double)), tf.Variable(tf.zeros([30, 2])), tf.Variable(tf.zeros([2]))]

    @tf.function(autograph=False)
    def step(x):
        grads = [tf.cast(tf.fill(v.shape, x), v.dtype) for v in variables[:-1]]
        grads[-1] = tf.IndexedSlices(tf.fill([2, 2], x), tf.constant([3, 3]), tf.constant([30, 2]))
        mgr.apply_gradients(optimizer, [*grads, None], variables)

    return step.get_concrete_function(tf.constant(1.0)), variables


SOME = ("horovod", "compact", "variables-auto-auto", "elements-auto-auto", "masters", "independent")
FEW = {name: MODES[name] for name in SOME}


@widely(MODES, FEW)
def the_graph_has_the_reported_collectives(world, mode):
    name, options = mode
    mgr = hv.create(name, **options)
    function, _ = traced(mgr, keras.optimizers.SGD(0.1))
    (plan,) = mgr.report()["plans"]
    found = horovod_operations(function)
    sometimes = 1 if "verify_every" in options and world.size > 1 else 0
    assert len(found) - sometimes == plan["collectives_per_step"], f"{plan} but {found}"
    same_everywhere(world, sorted(found), "the operations")


@case(params={name: MODES[name] for name in ("variables-auto-auto", "elements-auto-auto")}, sizes=(2, 3, 4))
def the_norm_of_all_gradients_is_counted(world, mode):
    name, options = mode
    mgr = hv.create(name, **options)
    function, _ = traced(mgr, keras.optimizers.SGD(0.1, global_clipnorm=1.0), "float32")
    assert len(horovod_operations(function)) == mgr.report()["plans"][0]["collectives_per_step"]


@case(params=FEW, hows=("mpi",))
@case(params={name: MODES[name] for name in ("staged", "staged-elements")}, sizes=(2,), hows=("mpi",))
@case(params={"elements-auto-auto": MODES["elements-auto-auto"]}, hows=("gloo", "horovodrun", "bare"))
def it_is_plain_data_about_what_runs(world, mode):
    name, options = mode
    mgr, optimizer = hv.create(name, **options), keras.optimizers.Adam()
    assert mgr.report()["plans"] == []
    _, variables = traced(mgr, optimizer)
    report = mgr.report()
    assert json.loads(json.dumps(report)) == report
    staged = options.get("staged_vars", False)
    assert report["mode"] == name
    assert report["class"] == ("VariableMgrLocalFetchFromStagedPS" if staged else CLASSES[name])
    place = {"rank": world.rank, "size": world.size, "nodes": 1, "transport": "Gloo" if world.how == "gloo" else "MPI"}
    assert report["world"] == place
    assert {option: report["options"][option] for option in options} == options
    (plan,) = report["plans"]
    assert plan["variables"] == len(variables) and len(plan["owners"]) == world.size
    if name != "independent":
        same_everywhere(
            world, {k: v for k, v in plan.items() if k not in ("optimizer_bytes", "master_bytes")}, "the plan"
        )
    slots = sum(2 * int(tf.size(v)) * v.dtype.size for v in variables)
    everywhere = world.meeting.gather_objects(plan["optimizer_bytes"], "tests.slots")
    if name in ("parameter_server", "distributed_replicated"):
        trained = slots - 2 * 2 * 4  # the variable without a gradient need not have an owner
        assert trained <= sum(everywhere) <= slots, (everywhere, slots)
        masters = world.meeting.gather_objects(plan.get("master_bytes"), "tests.masters")
        if staged or name == "distributed_replicated":
            assert trained <= 2 * sum(masters) <= slots, (masters, slots)
        else:
            assert masters == [None] * world.size
    else:
        assert everywhere == [slots] * world.size, (everywhere, slots)


@case(params={name: MODES[name] for name in ("hybrid", "hybrid-none")}, sizes=(1, 2), hows=("mpi",))
def each_range_of_a_spec_is_reported(world, mode):
    name, options = mode
    mgr = hv.create(name, sparse="dense", **options)
    traced(mgr, keras.optimizers.SGD(0.1))
    assert mgr.report()["class"] == CLASSES[name]
    (plan,) = mgr.report()["plans"]
    ranges = plan["ranges"]
    assert [part["limit"] for part in ranges] == ([8, 100, None] if len(ranges) == 3 else [8, None])
    assert [part["tensors"] for part in ranges] == ([3, 4, 1] if len(ranges) == 3 else [3, 5])
    assert sum(part["bytes"] for part in ranges) == plan["bytes_per_step"]
    assert sum(part["collectives"] for part in ranges) == plan["collectives_per_step"]


@case(sizes=(2, 3, 4))
def bytes_per_step(world):
    def sent(mode, **options):
        mgr = hv.create(mode, **options)
        variables = [tf.Variable(tf.zeros([64])), tf.Variable(tf.zeros([32], "float64"))]
        mgr.apply_gradients(keras.optimizers.SGD(0.1), [tf.ones_like(v) for v in variables], variables)
        return mgr.report()["plans"][0]["bytes_per_step"]

    assert sent("horovod") == sent("horovod", fusion="none") == 512
    assert sent("horovod", compact_gradient_transfer=True) == 128 + 256
    assert sent("parameter_server") >= 1024  # there and back
    assert sent("distributed_replicated") == sent("parameter_server", staged_vars=True) == sent("parameter_server")
    assert sent("distributed_replicated", copy_dtype="float16") < sent("distributed_replicated")


@case(sizes=(4,), hows=("2+2",))
def owners_on_several_nodes(world):
    for name, options in (("parameter_server", {}), MODES["staged-elements"], MODES["masters"]):
        mgr = hv.create(name, **options)
        traced(mgr, keras.optimizers.SGD(0.1))
        staged = "Staged" if "staged_vars" in options else ""
        expected = CLASSES[name] if name != "parameter_server" else f"VariableMgrDistributedFetchFrom{staged}PS"
        assert mgr.report()["class"] == expected and mgr.report()["world"]["nodes"] == 2
