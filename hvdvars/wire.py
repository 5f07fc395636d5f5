"""Which dtypes Horovod's operations carry, and how the others travel as one of these."""

from __future__ import annotations

import tensorflow as tf

from hvdvars.session import world

# Horovod's own lists of wire types (horovod/tensorflow/mpi_ops.cc). What is missing travels as another type.
_SUMMED = {"uint8", "int8", "int32", "int64", "float16", "float32", "float64"}
_SUMMED_AS = {
    "bfloat16": "float32",
    "int16": "int32",
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "int64",
}
_MOVED = _SUMMED | {"uint16", "int16", "bool"}
_MOVED_AS = {
    "bfloat16": "uint16",
    "uint32": "int32",
    "uint64": "int64",
}
_PAIRS = {"complex64": "float32", "complex128": "float64"}
SCATTERED = _SUMMED - {"uint8", "int8"}


def reduction_type(function: str, dtype: tf.DType, name: str, scale: float) -> str:
    """The wire type that sums tensors of `dtype`. Local. Raises TypeError for types without an exact scaled sum."""
    if scale != 1.0 and dtype.is_integer:
        raise TypeError(
            f"{function}: '{name}' has dtype {dtype.name}, whose scaled sum is not exact on rank {world().rank}. "
            "Use average=False, or cast to a floating type."
        )
    wire = dtype.name if dtype.name in _SUMMED else _SUMMED_AS.get(dtype.name) or _PAIRS.get(dtype.name)
    if wire is None:
        raise TypeError(
            f"{function}: '{name}' has dtype {dtype.name} on rank {world().rank}, which cannot be summed. "
            f"Expected one of {', '.join(sorted(_SUMMED | set(_SUMMED_AS) | set(_PAIRS)))}; cast it first."
        )
    return wire


def transfer_type(function: str, dtype: tf.DType, name: str) -> str:
    """The wire type that moves tensors of `dtype`. Local. Raises TypeError for types that nothing can carry."""
    wire = dtype.name if dtype.name in _MOVED else _MOVED_AS.get(dtype.name) or _PAIRS.get(dtype.name)
    if wire is None:
        raise TypeError(
            f"{function}: '{name}' has dtype {dtype.name} on rank {world().rank}, which cannot be sent. "
            f"Expected one of {', '.join(sorted(_MOVED | set(_MOVED_AS) | set(_PAIRS)))}."
        )
    return wire


def to_wire(tensor: tf.Tensor, wire: str) -> tf.Tensor:
    """The tensor as the wire type that sums it. Local."""
    if tensor.dtype.name == wire:
        return tensor
    return to_bits(tensor, wire) if tensor.dtype.is_complex else tf.cast(tensor, wire)


def from_wire(tensor: tf.Tensor, dtype: tf.DType, like: tf.Tensor) -> tf.Tensor:
    """What `to_wire` made and a collective returned, as `dtype` and with the static shape of `like`. Local."""
    if tensor.dtype == dtype:
        result = tensor
    else:
        result = from_bits(tensor, dtype) if dtype.is_complex else tf.cast(tensor, dtype)
    return result if result.shape == like.shape else tf.ensure_shape(result, like.shape)


def to_bits(tensor: tf.Tensor, wire: str) -> tf.Tensor:
    """The same bits as another dtype; complex numbers get a last dimension of two. Local."""
    return tensor if tensor.dtype.name == wire else tf.bitcast(tensor, wire)


def from_bits(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The inverse of `to_bits`. Local."""
    return tensor if tensor.dtype == dtype else tf.bitcast(tensor, dtype)
