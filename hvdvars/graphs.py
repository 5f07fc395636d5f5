"""What a collective needs of the graph that it is in: a name, an order, and that it runs once a step on every rank.

TensorFlow takes Horovod's operations for pure functions. It would run one on constants while it optimizes the graph,
and never again; merge two of equal input; and drop one whose result is not used. Where only one rank's graph gives the
occasion, the others wait for it for ever. No Horovod here.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

_watchers: list[list[Any]] = []

_uses: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def unique(name: str) -> str:
    """`name`, numbered when one graph uses it again.

    Counted per outermost function, so that a loop body and the function round it never use one name at one time, and so
    that a rank that traces again alone arrives at the names the others use. Local.
    """
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and _is_function(graph.outer_graph):
        graph = graph.outer_graph
    counts = _uses.setdefault(graph, {})
    counts[name] = counts.get(name, 0) + 1
    return name if counts[name] == 1 else f"{name}.again{counts[name] - 1}"


def take_order(name: str) -> None:
    """Write to a variable of this name: functions inside a function that use it then run one after the other.

    Local.
    """
    with tf.init_scope():
        if not tf.executing_eagerly():
            return  # a graph of TensorFlow 1 has no functions of ours inside
        order = _own_variable(name, 0)
    order.assign_add(0, read_value=False)


def hold(tensor: tf.Tensor) -> tf.Tensor:
    """`tensor` itself, not copied, as a slice that begins where only the graph says that runs. Local."""
    rank = tensor.shape.rank
    if rank is None:
        return tensor
    if rank == 0:
        return tf.reshape(hold(tf.reshape(tensor, [1])), [])
    return tf.slice(tensor, _unknown_zeros(rank), [-1] * rank)


def _unknown_zeros(count: int) -> tf.Tensor:
    with tf.init_scope():
        eager = tf.executing_eagerly()
        zeros = _own_variable(f"zeros {count}", [0] * count) if eager else None
    if zeros is not None:
        return zeros.read_value()
    # A graph of TensorFlow 1 has no place for the variable. Numbers from 0 up to, but not including, 1 do as well.
    with tf.device("/CPU:0"):
        return tf.raw_ops.RandomUniformInt(shape=[count], minval=0, maxval=1)


_own: dict[str, tf.Variable] = {}


def _own_variable(key: str, value: Any) -> tf.Variable:
    """The variable of this key, made when it is first asked for.

    It is made in a thread of its own, out of reach of the scopes around the caller: a `tf.function` that is traced
    again lets nobody make variables.
    """

    def make() -> None:
        with tf.device("CPU:0"):
            _own[key] = tf.Variable(value, dtype=tf.int32, trainable=False, name="hvdvars_own")

    if key not in _own:
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    return _own[key]


def demand(results: list[tf.Tensor]) -> list[tf.Tensor]:
    """The results of an operation, which runs whether they are used or not. Local."""
    # An assertion always runs, and this one needs the result.
    asserted = tf.raw_ops.Assert(condition=tf.constant(True), data=[_seen(results[0])])
    if _is_function(tf.compat.v1.get_default_graph()):
        return results
    # A graph of TensorFlow 1 runs only what somebody asks for.
    for made in _watchers:
        made.append(asserted)
    with tf.control_dependencies([asserted]):
        return [tf.identity(result) for result in results]


def _seen(result: tf.Tensor) -> tf.Tensor:
    """As little of a result as tells that it is there: what is on a device is copied to the host for the assertion."""
    if result.shape.rank == 0:
        return result
    if _is_function(tf.compat.v1.get_default_graph()):
        return tf.shape(result)
    # In a graph of TensorFlow 1 a shape may be found out before it runs; a value may not.
    return tf.reshape(result, [-1])[:1]


@contextlib.contextmanager
def watched() -> Iterator[list[tf.Operation]]:
    """A list of operations that run the collectives made inside, in a graph of TensorFlow 1: what nobody asks for there
    does not run, and other ranks may ask for their part. Local.
    """
    made: list[tf.Operation] = []
    _watchers.append(made)
    try:
        yield made
    finally:
        _watchers.pop()


def call(kind: str, communicate: Callable[..., list[tf.Tensor]], name: str, *tensors: tf.Tensor) -> list[tf.Tensor]:
    """What `communicate(name, *tensors)` gives: in this graph, or eagerly in a `tf.function` made once.

    `kind` tells functions apart that have one name. Collective as `communicate` is.
    """
    if not tf.executing_eagerly():
        return communicate(name, *tensors)
    signature = (kind, name, tuple(tensor.dtype.name for tensor in tensors))
    return _compiled(signature, communicate, tuple(t.shape.rank for t in tensors))(*tensors)


_functions: dict[Any, Any] = {}


def _compiled(signature: Any, communicate: Callable[..., list[tf.Tensor]], ranks: tuple[int, ...]) -> Any:
    """One `tf.function` per collective and name: in graphs Horovod honours the name."""
    key = (*signature, ranks)
    if key not in _functions:
        name = signature[1]
        _functions[key] = tf.function(
            functools.partial(communicate, name), reduce_retracing=True, jit_compile=False, autograph=False
        )
    return _functions[key]


def evaluate(communicate: Callable[[], tf.Tensor]) -> np.ndarray:
    """The value of a tensor that `communicate` makes with collectives, at once, whatever graph is being built.

    Collective: every rank of the group calls it in the same order. A program that has turned TensorFlow 2's behaviour
    off, or is inside a graph of TensorFlow 1, gets a graph and a session of its own for it.
    """
    with tf.init_scope():
        if tf.executing_eagerly():
            return communicate().numpy()
    # Threads and devices of its own: what is set in the first session of a process holds for all later ones.
    settings = tf.compat.v1.ConfigProto(
        use_per_session_threads=True, intra_op_parallelism_threads=1, inter_op_parallelism_threads=2
    )
    settings.device_count["GPU"] = 0
    with tf.Graph().as_default(), tf.compat.v1.Session(config=settings) as session_:
        return session_.run(communicate())


def _is_function(graph: Any) -> bool:
    return hasattr(graph, "outer_graph")  # a tf.Graph has none
