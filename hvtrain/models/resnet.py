"""ResNet-20 for small images, as in He et al. for CIFAR-10 (2015, arXiv:1512.03385, section 4.2)."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import layers

from hvtrain.errors import ConfigError
from hvtrain.models.input_output import image_input, logits

STAGES = (16, 32, 64)  # filters; the second and the third stage begin with a stride of 2


def resnet20(image_shape: Sequence[int], num_classes: int, blocks_per_stage: int = 3) -> keras.Model:
    """Three stages of residual blocks: depth 6 n + 2 for n blocks per stage, so 3 gives ResNet-20, 9 ResNet-56.

    272,474 trainable parameters on 32x32x3 with 10 classes (Keras counts 1,568 more, the moving means and
    variances). If a stage changes the shape, the shortcut is a 1x1 convolution: the paper's option B, as in most
    code. The paper's own CIFAR runs used option A, zero padding, with 2,752 fewer parameters.
    """
    if blocks_per_stage < 1:
        raise ConfigError(f"resnet20 was given blocks_per_stage={blocks_per_stage}; it needs at least 1 (3 is usual)")

    image = image_input(image_shape, num_classes, network="resnet20")
    x = layers.ReLU(name="relu")(_convolve(image, STAGES[0], strides=1, name="conv"))
    for s, filters in enumerate(STAGES, start=1):
        for b in range(1, blocks_per_stage + 1):
            x = _block(x, filters, strides=2 if s > 1 and b == 1 else 1, name=f"stage{s}_block{b}")
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(image, logits(x, num_classes, "he_normal"), name=f"resnet{6 * blocks_per_stage + 2}")


def _block(x: Any, filters: int, strides: int, name: str) -> Any:
    shortcut = x
    if strides > 1:
        shortcut = _convolve(x, filters, strides, name=f"{name}_shortcut", size=1)
    x = _convolve(x, filters, strides, name=f"{name}_conv1")
    x = layers.ReLU(name=f"{name}_relu1")(x)
    x = _convolve(x, filters, strides=1, name=f"{name}_conv2")
    x = layers.Add(name=f"{name}_add")([x, shortcut])
    return layers.ReLU(name=f"{name}_relu2")(x)


def _convolve(x: Any, filters: int, strides: int, name: str, size: int = 3) -> Any:
    x = layers.Conv2D(
        filters,
        size,
        strides=strides,
        padding="same",
        use_bias=False,  # the batch normalization that follows has its own
        kernel_initializer="he_normal",
        name=name,
    )(x)
    # Keras's default momentum, 0.99, is slow for runs of a few hundred steps; 0.9 is usual.
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"{name}_norm")(x)
