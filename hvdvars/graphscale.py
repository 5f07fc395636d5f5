"""The automatic loss scale in graphs of TensorFlow 1, in variables of the caller's: updates apply or are skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from hvdvars import scaling

v1 = tf.compat.v1


class AutoLossScaleParams(NamedTuple):
    """What a caller says of its loss scale."""

    enable_auto_loss_scale: bool
    loss_scale: Any
    """A float32 variable, or None."""
    loss_scale_normal_steps: Any
    """An integer variable: normal steps since the scale changed."""
    inc_loss_scale_every_n: int
    is_chief: bool
    """Whether this process keeps the scale; others apply their updates in any case."""


def get_loss_scale_update_op(loss_scale: Any, loss_scale_normal_steps: Any, inc_loss_scale_every_n: int) -> Any:
    """The operation that counts a normal step, and doubles the scale after enough of them; see `scaling`. Local."""
    return _update(loss_scale, loss_scale_normal_steps, inc_loss_scale_every_n, True)


def _update(scale: Any, normal_steps: Any, every_n: int, finite: bool) -> Any:
    before = scaling.LossScale(tf.cast(scale.read_value(), tf.float32), normal_steps.read_value())
    after = scaling.update(before, tf.constant(finite), every_n)
    # Both are worked out before either is written.
    with tf.control_dependencies(list(after)):
        return tf.group(
            scale.assign(tf.cast(after.scale, scale.dtype.base_dtype)), normal_steps.assign(after.good_steps)
        )


def append_gradients_with_loss_scale(
    training_ops: list[Any],
    get_apply_gradients_ops_func: Callable[[], list[Any]],
    loss_scale_params: Any,
    grad_has_inf_nan: Any,
) -> None:
    """Add to `training_ops` the operations that the function gives, skipped where a gradient is not finite.

    A skipped step halves the loss scale. Local.

    Raises:
        ValueError: the loss scale is automatic, but nobody found out whether gradients are finite.
    """
    given = loss_scale_params
    if given.loss_scale is None or not given.enable_auto_loss_scale or not given.is_chief:
        training_ops.extend(get_apply_gradients_ops_func())
        return
    if grad_has_inf_nan is None:
        raise ValueError(
            "append_gradients_with_loss_scale: the loss scale is automatic, but grad_has_inf_nan is None. Create the "
            "manager with an automatic loss scale too, so that it looks at the gradients."
        )
    kept = (given.loss_scale, given.loss_scale_normal_steps, given.inc_loss_scale_every_n)
    training_ops.append(
        _either(
            grad_has_inf_nan,
            lambda: _update(*kept, False),
            lambda: tf.group(_update(*kept, True), *get_apply_gradients_ops_func()),
        )
    )


def append_gradients_if_finite(
    training_ops: list[Any], get_apply_gradients_ops_func: Callable[[], list[Any]], grad_has_inf_nan: Any
) -> None:
    """The same for what is applied beside it in the same step: skipped alike, without a change of the scale. Local."""
    apply = get_apply_gradients_ops_func
    training_ops.append(_either(grad_has_inf_nan, lambda: tf.group(), lambda: tf.group(*apply())))


def _either(wrong: Any, skip: Callable[[], Any], apply: Callable[[], Any]) -> Any:
    # Branches that are functions, as TensorFlow 2 has them, cannot write to a variable that is a reference.
    functions = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        return v1.cond(wrong, skip, apply, name="cond_if_grad_has_inf_nan")
    finally:
        if functions:
            v1.enable_control_flow_v2()
