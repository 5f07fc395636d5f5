"""Gradient profiles: the shapes of a model's trainable tensors, in the order of its layers. Pure, no TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

Shape = tuple[int, ...]
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Profile:
    """A named list of float32 tensor shapes."""

    name: str
    title: str
    shapes: tuple[Shape, ...]

    @property
    def elements(self) -> int:
        """Floats in all tensors together."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors together."""
        return self.elements * FLOAT_BYTES


def _normalized_conv(size: int, inputs: int, outputs: int) -> Iterator[Shape]:
    """A convolution without bias, then gamma and beta of its batch normalization."""
    yield (size, size, inputs, outputs)
    yield (outputs,)
    yield (outputs,)


def resnet50() -> tuple[Shape, ...]:
    """The 161 trainable tensors of ResNet-50 (v1, 1000 classes, convolutions without bias)."""
    shapes = list(_normalized_conv(7, 3, 64))
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        outputs = 4 * width
        for block in range(blocks):
            shapes += _normalized_conv(1, inputs, width)
            shapes += _normalized_conv(3, width, width)
            shapes += _normalized_conv(1, width, outputs)
            if block == 0:
                shapes += _normalized_conv(1, inputs, outputs)
            inputs = outputs
    return (*shapes, (inputs, 1000), (1000,))


def vgg16() -> tuple[Shape, ...]:
    """The 32 trainable tensors of VGG-16 (1000 classes)."""
    shapes: list[Shape] = []
    inputs = 3
    for outputs, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers):
            shapes += [(3, 3, inputs, outputs), (outputs,)]
            inputs = outputs
    for rows, columns in ((7 * 7 * 512, 4096), (4096, 4096), (4096, 1000)):
        shapes += [(rows, columns), (columns,)]
    return tuple(shapes)


def small_cnn() -> tuple[Shape, ...]:
    """Two convolutions and two dense layers for 8x8 grey images of ten classes: 8 tensors."""
    return ((3, 3, 1, 16), (16,), (3, 3, 16, 32), (32,), (512, 64), (64,), (64, 10), (10,))


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("1000x256", "1000 x 256 floats", ((256,),) * 1000),
        Profile("resnet50", "ResNet-50, 161 tensors", resnet50()),
        Profile("vgg16", "VGG-16, 32 tensors", vgg16()),
        Profile("100MB", "one 100 MB tensor", ((25_000_000,),)),
        Profile("cnn", "small CNN, 8 tensors", small_cnn()),
    )
}
