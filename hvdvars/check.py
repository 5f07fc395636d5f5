"""Local checks of arguments; their messages name the function, the argument, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdvars.types import Gradient


def name_of(variable: Any) -> str:
    """The variable's name, as messages and plans show it: Keras 3's path, else the name without `:0`. Local."""
    path = getattr(variable, "path", None)
    name = path if isinstance(path, str) and path else getattr(variable, "name", None)
    return name.removesuffix(":0") if isinstance(name, str) else f"<{type(variable).__name__}>"


def dtype_of(value: Any) -> tf.DType:
    """The dtype of a tensor, slices or variable (Keras 3 gives it as a string), without `_ref`. Local."""
    return tf.as_dtype(value.dtype).base_dtype


def shape_of(value: Any) -> tf.TensorShape:
    """The static shape of a tensor, slices or variable; Keras 3 gives it as a tuple. Local."""
    return tf.TensorShape(value.shape)


def length_of(tensor: Any) -> Any:
    """The first dimension, a number or None, also where a program uses TensorFlow 1's `Dimension`. Local."""
    return tf.compat.dimension_value(tensor.shape[0])


def check_sequence(function: str, argument: str, value: Any) -> list[Any]:
    """`value` as a list, refused unless it is an ordered collection (a tensor, a set or one variable is none).

    Local. Raises TypeError.
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(
            f"{function}: {argument} must be a list or a tuple, got {_kind(value)}; "
            f"use [{argument}] for a single one and list({argument}) for an iterator"
        )
    return list(value)


def check_variables(function: str, variables: Any) -> list[Any]:
    """`variables` as a list of different variables.

    Local. Raises TypeError for anything that is no variable, ValueError for a variable that appears twice.
    """
    checked = check_sequence(function, "variables", variables)
    first: dict[int, int] = {}
    for index, variable in enumerate(checked):
        if not all(hasattr(variable, part) for part in ("assign", "shape", "dtype")):
            raise TypeError(
                f"{function}: variables[{index}] must be a variable, got {_kind(variable)}{_pairs_hint(variable)}"
            )
        before = first.setdefault(id(variable), index)
        if before != index:
            raise ValueError(
                f"{function}: variables[{index}] ({name_of(variable)}) is also variables[{before}]; give each one once"
            )
    return checked


def check_aligned(function: str, grads: Any, variables: Any) -> tuple[list[Gradient], list[Any]]:
    """Both as lists of equal length, where each gradient has its variable's shape and dtype, or is None.

    Arrays and Python numbers become tensors of the variable's dtype; unknown dimensions fit any. Local. Raises
    TypeError for other types and dtypes, ValueError for other lengths and shapes.
    """
    checked_variables = check_variables(function, variables)
    checked = check_sequence(function, "grads", grads)
    if len(checked) != len(checked_variables):
        raise ValueError(
            f"{function}: got {len(checked)} grads for {len(checked_variables)} variables; "
            "give one gradient for each variable, in the same order, and None where there is none"
        )
    aligned = [
        check_gradient(function, f"grads[{index}] ({name_of(variable)})", grad, variable)
        for index, (grad, variable) in enumerate(zip(checked, checked_variables, strict=True))
    ]
    return aligned, checked_variables


def check_gradient(function: str, argument: str, grad: Any, variable: Any) -> Gradient:
    """One gradient with its variable's shape and dtype; what is no tensor yet becomes one.

    Local. Raises TypeError for other types and dtypes, ValueError for another shape.
    """
    if grad is None:
        return None
    dtype, shape = dtype_of(variable), shape_of(variable)
    slices = isinstance(grad, tf.IndexedSlices)
    grad = _as_slices(grad) if slices else _as_tensor(function, argument, grad, dtype)
    if dtype_of(grad) != dtype:
        raise TypeError(
            f"{function}: {argument} must have its variable's dtype {dtype.name}, got {dtype_of(grad).name}; "
            f"use tf.cast(grad, tf.{dtype.name})"
        )
    if slices:
        _check_slices(function, argument, grad, shape)
    elif not shape_of(grad).is_compatible_with(shape):
        raise ValueError(f"{function}: {argument} must have its variable's shape {shape}, got {grad.shape}")
    return grad


def check_known_shape(function: str, variable: Any) -> None:
    """Refuse a variable with unknown dimensions: plans are made once, for sizes that stay. Local. Raises ValueError."""
    if not shape_of(variable).is_fully_defined():
        raise ValueError(
            f"{function}: {name_of(variable)} has shape {shape_of(variable)}; "
            "every dimension of a variable must be known"
        )


def check_mean(function: str, argument: str, dtype: tf.DType) -> None:
    """Refuse a mean where it could not be exact or has no meaning: integers, bool, strings.

    Local. Raises TypeError.
    """
    if not (dtype.is_floating or dtype.is_complex):
        raise TypeError(
            f"{function}: {argument} has dtype {dtype.name}, whose mean would be rounded; "
            "use average=False for the sum, or cast to a floating dtype first"
        )


def _as_tensor(function: str, argument: str, grad: Any, dtype: tf.DType) -> tf.Tensor:
    if isinstance(grad, tf.Tensor):
        return grad
    if hasattr(grad, "__array__"):
        return tf.convert_to_tensor(grad)
    if isinstance(grad, (bool, int, float, complex)):
        return tf.convert_to_tensor(grad, dtype)
    raise TypeError(
        f"{function}: {argument} must be a tensor, tf.IndexedSlices or None, got {_kind(grad)}{_pairs_hint(grad)}"
    )


def _as_slices(grad: tf.IndexedSlices) -> tf.IndexedSlices:
    parts = (grad.values, grad.indices, grad.dense_shape)
    if all(part is None or isinstance(part, tf.Tensor) for part in parts):
        return grad
    return tf.IndexedSlices(*(None if part is None else tf.convert_to_tensor(part) for part in parts))


def _check_slices(function: str, argument: str, grad: tf.IndexedSlices, shape: tf.TensorShape) -> None:
    indices = grad.indices
    if indices.dtype not in (tf.int32, tf.int64) or not indices.shape.is_compatible_with([None]):
        raise TypeError(
            f"{function}: {argument}: indices must be a vector of int32 or int64, "
            f"got shape {indices.shape} of {indices.dtype.name}"
        )
    rows = shape_of(grad.values)
    wanted = tf.TensorShape(None) if shape.rank is None else tf.TensorShape([indices.shape[0]]) + shape[1:]
    if shape.rank == 0 or not rows.is_compatible_with(wanted):
        raise ValueError(
            f"{function}: {argument}: rows of shape {rows} with {indices.shape[0]} indices are no slices of a variable "
            f"of shape {shape}; expected values of shape {wanted if shape.rank != 0 else 'none, a scalar has no rows'}"
        )
    dense = None if grad.dense_shape is None else tf.get_static_value(grad.dense_shape)
    if dense is not None and not tf.TensorShape(dense).is_compatible_with(shape):
        raise ValueError(
            f"{function}: {argument}: dense_shape must be its variable's shape {shape}, got {tf.TensorShape(dense)}"
        )


def _kind(value: Any) -> str:
    return f"{' '.join(repr(value).split()):.60} ({type(value).__name__})"


def _pairs_hint(value: Any) -> str:
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    return "; give gradients and variables as two lists, not as pairs" if pair else ""
