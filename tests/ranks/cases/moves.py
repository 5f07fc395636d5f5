"""Each collective against what numpy computes from the ranks' inputs, eagerly and in a graph."""

import numpy as np
import tensorflow as tf

from . import case, widely
from .tools import array, close, data, digest, raised, same_everywhere, sum_of_ranks

SUMMED = [
    *("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
]
MOVED = [*SUMMED, "bool"]
SOME = ["float32", "bfloat16", "complex64", "uint16", "int64"]
SHAPES = [(), (1,), (0,), (2, 3), (0, 4), (257,)]


def ramp(shape, dtype, rank):
    """Small whole numbers that depend on the rank: exact in every dtype, and so are their sums."""
    numbers = (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 4 + 1) * (rank + 1)
    if dtype == "bool":
        return tf.constant(numbers % 3 == 0)
    if tf.as_dtype(dtype).is_complex:
        numbers = numbers * (1 - 2j)
    return tf.cast(tf.constant(numbers), dtype)


def graphed(call):
    """`call` inside a `tf.function`."""
    return tf.function(call, autograph=False)


@widely(SUMMED, SOME)
def sums(world, dtype):
    for way, wrap in (("eager", lambda call: call), ("graph", graphed)):
        for shape in SHAPES:
            tensor = ramp(shape, dtype, world.rank)
            name = f"sum.{dtype}.{'x'.join(map(str, shape))}.{way}"
            total = wrap(lambda tensor, name=name: world.collectives.all_reduce(tensor, name))(tensor)
            assert total.dtype == tensor.dtype
            close(total, array(ramp(shape, dtype, 0)).astype("complex128") * sum_of_ranks(world.size), name, 0)


@case()
def scaled_sums(world):
    for dtype in ("float16", "bfloat16", "float32", "float64", "complex64"):
        tensor = ramp((5,), dtype, world.rank)
        mean = world.collectives.all_reduce(tensor, f"mean.{dtype}", 1.0 / world.size)
        wanted = array(ramp((5,), dtype, 0)).astype("complex128") * (world.size + 1) / 2
        close(mean, wanted, dtype, 1e-2 if dtype.endswith("16") else 1e-6)
        half = world.collectives.all_reduce(tensor, f"half.{dtype}", 0.5)
        close(half, wanted * world.size / 2, dtype, 1e-2 if dtype.endswith("16") else 1e-6)


@case()
def what_cannot_be_summed_is_refused(world):
    message = raised(TypeError, lambda: world.collectives.all_reduce(tf.constant([True]), "bools"))
    assert "all_reduce" in message and "'bools'" in message and "bool" in message and f"rank {world.rank}" in message
    raised(TypeError, lambda: world.collectives.all_reduce(tf.constant(["a"]), "text"))
    for odd in (tf.constant(["a"]), tf.cast(tf.constant([1.0]), "float8_e5m2")):
        for call in (world.collectives.all_gather, lambda t, name: world.collectives.broadcast(t, 0, name)):
            message = raised(TypeError, lambda call=call, odd=odd: call(odd, "odd"))
            assert odd.dtype.name in message and "cannot be sent" in message
    for call in (world.collectives.all_reduce, world.collectives.reduce_scatter):
        message = raised(TypeError, lambda call=call: call(tf.ones([world.size], tf.int32), "ints", 0.5))
        assert "int32" in message and "average=False" in message
    message = raised(
        TypeError, lambda: world.collectives.all_reduce_group([tf.constant([1.0]), tf.constant([1])], "mixed")
    )
    assert "float32" in message and "int32" in message


@case()
def groups_are_summed_together(world):
    tensors = [ramp(shape, "float32", world.rank) for shape in SHAPES]
    for way, wrap in (("eager", lambda call: call), ("graph", graphed)):
        totals = wrap(lambda *given, way=way: world.collectives.all_reduce_group(given, f"group.{way}"))(*tensors)
        for shape, total in zip(SHAPES, totals, strict=True):
            close(total, array(ramp(shape, "float32", 0)) * sum_of_ranks(world.size), way, 0)


@case()
def sums_have_the_same_bits_on_all_ranks(world):
    generator = np.random.default_rng(world.rank)
    for dtype, size in [("float32", 3), ("float32", 70_001), ("float32", 400_000), ("float64", 1001), ("float16", 999)]:
        tensor = tf.cast(tf.constant(generator.standard_normal(size)), dtype)
        total = world.collectives.all_reduce(tensor, f"bits.{dtype}.{size}", 1 / 3)
        same_everywhere(world, digest(total), f"{dtype} {size}")


@widely(MOVED, [*SOME, "bool"])
def gathers_uneven_parts(world, dtype):
    for way, wrap in (("eager", lambda call: call), ("graph", graphed)):
        for rest in [(), (3,)]:
            parts = [ramp(((2 * rank + 1) % 4, *rest), dtype, rank) for rank in world.ranks]
            name = f"gather.{dtype}.{len(rest)}.{way}"
            whole = wrap(lambda part, name=name: world.collectives.all_gather(part, name))(parts[world.rank])
            assert whole.dtype == parts[0].dtype and whole.shape == (sum(p.shape[0] for p in parts), *rest)
            assert data(whole) == b"".join(map(data, parts)), name


@case()
def gathers_scalars_and_nothing(world):
    whole = world.collectives.all_gather(tf.constant(world.rank), "gather.scalars")
    assert whole.numpy().tolist() == list(world.ranks)
    assert world.collectives.all_gather(tf.zeros([0, 2]), "gather.nothing").shape == (0, 2)
    last = world.collectives.all_gather(tf.ones([int(world.rank == world.size - 1), 2]), "gather.last")
    assert last.shape == (1, 2)


@widely(MOVED, [*SOME, "bool"])
def broadcasts(world, dtype):
    for shape in SHAPES:
        for root in {0, world.size - 1}:
            name = f"broadcast.{dtype}.{'x'.join(map(str, shape))}.{root}"
            sent = world.collectives.broadcast(ramp(shape, dtype, world.rank), root, name)
            wanted = ramp(shape, dtype, root)
            assert (sent.dtype, sent.shape) == (wanted.dtype, wanted.shape)
            assert data(sent) == data(wanted), name
    message = raised(ValueError, lambda: world.collectives.broadcast(tf.zeros([1]), world.size, "broadcast.beyond"))
    assert f"rank {world.size}" in message


@widely(MOVED, [*SOME, "bool"])
def exchanges_uneven_parts(world, dtype):
    """Rank r sends (r + 2 s) % 3 rows to rank s: some send nothing, some receive nothing."""
    for way, wrap in (("eager", lambda call: call), ("graph", graphed)):
        for rest in [(), (2,)]:
            counts = [[(sender + 2 * receiver) % 3 for receiver in world.ranks] for sender in world.ranks]
            blocks = [ramp((sum(row), *rest), dtype, sender) for sender, row in enumerate(counts)]
            name = f"exchange.{dtype}.{len(rest)}.{way}"
            splits = counts[world.rank]
            received = wrap(lambda b, n=name, s=splits: world.collectives.all_to_all(b, s, n))(blocks[world.rank])
            starts = [np.cumsum([0, *row]) for row in counts]
            wanted = [
                blocks[sender][starts[sender][world.rank] : starts[sender][world.rank + 1]] for sender in world.ranks
            ]
            assert received.dtype == blocks[0].dtype
            assert received.shape == (sum(part.shape[0] for part in wanted), *rest)
            assert data(received) == b"".join(map(data, wanted)), name


@case()
def exchanges_where_one_rank_gets_everything(world):
    splits = [0] * (world.size - 1) + [4]
    received = world.collectives.all_to_all(ramp((4,), "float32", world.rank), splits, "exchange.last")
    assert received.shape == (4 * world.size if world.rank == world.size - 1 else 0,)
    message = raised(ValueError, lambda: world.collectives.all_to_all(tf.zeros([1]), [1] * (world.size + 1), "wrong"))
    assert f"{world.size + 1} splits" in message


@widely(SUMMED, SOME)
def scatters_sums(world, dtype):
    for way, wrap in (("eager", lambda call: call), ("graph", graphed)):
        for rest in [(), (3,)]:
            shape = (2 * world.size, *rest)
            name = f"scatter.{dtype}.{len(rest)}.{way}"
            part = wrap(lambda t, n=name: world.collectives.reduce_scatter(t, n))(ramp(shape, dtype, world.rank))
            whole = array(ramp(shape, dtype, 0)).astype("complex128") * sum_of_ranks(world.size)
            assert part.dtype == dtype
            close(part, whole[2 * world.rank : 2 * world.rank + 2], name, 0)
    mean = world.collectives.reduce_scatter(tf.fill([world.size], world.rank + 1.0), f"scatter.mean.{dtype}", 0.5)
    close(mean, [sum_of_ranks(world.size) / 2])


@case(sizes=(2, 3, 4))
def scattered_sums_need_equal_parts(world):
    for wrong in (tf.zeros([world.size + 1]), tf.zeros([])):
        message = raised(ValueError, lambda wrong=wrong: world.collectives.reduce_scatter(wrong, "wrong"))
        assert "reduce_scatter" in message and f"rank {world.rank}" in message


@case()
def names_repeat_without_harm(world):
    """One name twice in a graph, and again in a second trace that only the last rank makes."""

    @tf.function(autograph=False)
    def twice(tensor, flag):
        return [world.collectives.all_reduce(tensor * factor, "tests.again") for factor in (1.0, 10.0)], flag

    tensor = tf.constant([world.rank + 1.0])
    for flag in ("first", "first" if world.rank < world.size - 1 else "traced again"):
        one, ten = twice(tensor, flag)[0]
        close(one, [sum_of_ranks(world.size)])
        close(ten, [sum_of_ranks(world.size) * 10])
