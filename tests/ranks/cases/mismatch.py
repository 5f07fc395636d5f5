"""Ranks that disagree: one exchange at the first use, then the same error on every rank, and nothing was sent."""

import keras
import numpy as np
import tensorflow as tf

import hvdvars as hv

from . import case
from .tools import close, raised, same_everywhere

SIZES = (2, 3, 4)
MANAGERS = {"horovod": {}, "parameter_server": {}}


def zeros(name, shape=(2,), dtype="float32"):
    return tf.Variable(tf.zeros(shape, dtype), name=name)


def refused(world, make, *words, mode="horovod", kind=ValueError):
    """`make()` gives this rank's variables: reduce and apply_gradients both say what is wrong, on every rank alike."""
    for function in ("reduce", "apply_gradients"):
        mgr, variables = hv.create(mode), make()
        grads = [tf.ones_like(variable) for variable in variables]
        call = mgr.reduce if function == "reduce" else lambda g, v, m=mgr: m.apply_gradients(lambda g, v: None, g, v)
        message = raised(kind, lambda call=call, grads=grads, variables=variables: call(grads, variables))
        for word in (function, *words):
            assert word in message, f"{word!r} is not in: {message}"
        same_everywhere(world, message, "the message")


def odd(world):
    """Whether this is the rank that does something else."""
    return world.rank == 1


@case(sizes=SIZES, params=MANAGERS)
def variables_in_another_order(world, _):
    names = ["right", "left"] if odd(world) else ["left", "right"]
    refused(world, lambda: [zeros(name) for name in names], "variables[0] is left on rank 0 and right on rank 1")


@case(sizes=SIZES, params=["horovod", "parameter_server"])
def another_shape(world, mode):
    wanted = "variables[1] (kernel) has shape [2] on rank 0 and [3] on rank 1"
    refused(world, lambda: [zeros("bias"), zeros("kernel", (3 if odd(world) else 2,))], wanted, mode=mode)


@case(sizes=SIZES, params=["horovod", "parameter_server"])
def another_dtype(world, mode):
    wanted = "variables[0] (bias) has dtype float32 on rank 0 and float64 on rank 1"
    refused(world, lambda: [zeros("bias", dtype="float64" if odd(world) else "float32")], wanted, mode=mode)


@case(sizes=SIZES)
def a_dtype_that_has_no_mean_on_one_rank(world):
    wanted = "variables[0] (bias) has dtype float32 on rank 0 and int32 on rank 1"
    refused(world, lambda: [zeros("bias", dtype="int32" if odd(world) else "float32")], wanted)


@case(sizes=SIZES, params=["horovod", "parameter_server"])
def another_number_of_variables(world, mode):
    more = ["c"] if odd(world) else []
    refused(world, lambda: [zeros(n) for n in ["a", "b", *more]], "rank 0 has 2 variables, rank 1 has 3", mode=mode)


@case(sizes=SIZES)
def another_mode(world):
    mgr, variables = hv.create("parameter_server" if odd(world) else "horovod"), [zeros("a")]
    message = raised(ValueError, lambda: mgr.reduce([tf.ones([2])], variables))
    assert "mode is 'horovod' on rank 0 and 'parameter_server' on rank 1" in message
    same_everywhere(world, message, "the message")


@case(
    sizes=SIZES,
    params={
        "average": ("horovod", {"average": False}),
        "fusion": ("horovod", {"fusion": "none"}),
        "all_reduce_spec": ("replicated", {"all_reduce_spec": "xring#2"}),
        "placement": ("parameter_server", {"placement": "elements"}),
        "reduce_to_owner": ("parameter_server", {"reduce_to_owner": "all_reduce"}),
        "gradient_clip": ("horovod", {"gradient_clip": 1.0}),
        "none_gradients": ("horovod", {"none_gradients": "zeros"}),
    },
)
def another_option(world, choice):
    mode, options = choice
    (name, value), variables = next(iter(options.items())), [zeros("a")]
    mgr = hv.create(mode, **(options if odd(world) else {}))
    message = raised(ValueError, lambda: mgr.reduce([tf.ones([2])], variables))
    assert f"{name} is " in message and f"{value!r} on rank 1" in message, message
    same_everywhere(world, message, "the message")


@case(sizes=SIZES)
def another_function(world):
    mgr, variables = hv.create("horovod"), [zeros("a")]
    apply = lambda: mgr.apply_gradients(lambda g, v: None, [tf.ones([2])], variables)  # noqa: E731
    message = raised(ValueError, apply if odd(world) else lambda: mgr.reduce([tf.ones([2])], variables))
    assert "rank 0 is in reduce, rank 1 is in apply_gradients" in message
    same_everywhere(world, message.partition(":")[2], "the message")
    message = raised(ValueError, (lambda: mgr.broadcast(variables)) if odd(world) else lambda: hv.verify(variables))
    assert "rank 0 is in verify, rank 1 is in broadcast" in message


@case(sizes=SIZES)
def another_number_of_managers(world):
    """Their numbers are part of the names on the wire."""
    if odd(world):
        hv.create("horovod")
    mgr, variables = hv.create("horovod"), [zeros("a")]
    message = raised(ValueError, lambda: mgr.reduce([tf.ones([2])], variables))
    assert "manager is " in message and "rank 1" in message
    if not odd(world):
        hv.create("horovod")


@case(sizes=SIZES, params=["horovod", "parameter_server"])
def broadcast_of_other_variables(world, mode):
    for make, words in (
        (lambda: [zeros("a", (2 + odd(world),))], "has shape [2] on rank 0 and [3] on rank 1"),
        (lambda: [zeros("a")] * (1 + odd(world)), "rank 0 has 1 variables, rank 1 has 2"),
        (lambda: [zeros("b" if odd(world) else "a")], "variables[0] is a on rank 0 and b on rank 1"),
    ):
        mgr, variables = hv.create(mode), make()
        message = raised(ValueError, lambda mgr=mgr, variables=variables: mgr.broadcast(variables))
        assert "broadcast" in message and words in message, message
        same_everywhere(world, message, "the message")


@case(sizes=SIZES)
def counters_in_names_do_not_matter(world):
    """A rank that built another model before has `dense_3` where the others have `dense`."""
    if odd(world):
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(3)])
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(2)])
    variables = model.trainable_variables
    reduced = hv.create("horovod").reduce([np.ones(v.shape, "float32") for v in variables], variables)
    for tensor in reduced:
        close(tensor, np.ones(tensor.shape))
    hv.verify(variables)


@case(sizes=SIZES)
def layers_in_another_order(world):
    """The same shapes under other names are other variables."""

    def make():
        layers = [keras.layers.Dense(2, name="first"), keras.layers.Dense(2, name="second")]
        inputs = keras.Input((2,))
        for layer in reversed(layers) if odd(world) else layers:
            inputs = layer(inputs)
        return [layer.kernel for layer in (reversed(layers) if odd(world) else layers)]

    refused(world, make, "first/kernel on rank 0", "second/kernel on rank 1")


@case(sizes=SIZES)
def all_differences_are_listed_up_to_a_few(world):
    names = [f"v{chr(97 + index)}" for index in range(20)]
    shape = (1 + odd(world),)
    refused(world, lambda: [zeros(name, shape) for name in names], "variables[0] (va)", "variables[7] (vh)", "more")
