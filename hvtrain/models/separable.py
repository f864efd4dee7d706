"""A separable CNN with selu that trains, and the option under which it does not (docs/separable.md explains why)."""

from collections.abc import Sequence

import keras
from keras import layers

from hvtrain.models.input_output import check_activation, check_name, image_input, logits

KERNEL = 3  # pixels on a side, in every convolution
BLOCKS = ((128,), (256, 256), (512, 512))  # filters of the separable convolutions; a pooling ends each block


def separable_cnn(
    image_shape: Sequence[int],
    num_classes: int,
    activation: str = "selu",
    initializer: str = "lecun_normal",
    depthwise_initializer: str = "unit_gain",
) -> keras.Model:
    """Chollet's separable convolutions (2017) between one plain convolution and one dense layer of 512.

    2,887,306 parameters on 28x28x1 with 10 classes; images from 8x8.

    initializer: of the plain, pointwise and dense kernels, a Keras name.
    depthwise_initializer: "unit_gain", or a Keras name. Each output of a depthwise kernel sees KERNEL**2 = 9
        inputs, but Keras reads its shape (3, 3, C, 1) as a fan-in of 9*C: under lecun, he and glorot the
        variance of the signal falls by a factor near C in each such layer (keras issue 11773), and after
        five of them nothing is left to train on. "unit_gain" draws from a normal distribution with
        variance 1/9, so that a sum of 9 inputs keeps their variance.
    """
    check_activation("separable_cnn", activation)
    examples = "lecun_normal, glorot_uniform or he_normal"
    check_name("separable_cnn", "initializer", initializer, keras.initializers.get, examples)
    examples += "; or unit_gain"
    check_name("separable_cnn", "depthwise_initializer", depthwise_initializer, _depthwise, examples)

    image = image_input(image_shape, num_classes, network="separable_cnn", min_side=2 ** len(BLOCKS))
    x = layers.Conv2D(128, KERNEL, padding="same", activation=activation, kernel_initializer=initializer, name="conv")(
        image
    )
    for b, block in enumerate(BLOCKS, start=1):
        for i, filters in enumerate(block, start=1):
            x = layers.SeparableConv2D(
                filters,
                KERNEL,
                padding="same",
                activation=activation,
                depthwise_initializer=_depthwise(depthwise_initializer),
                pointwise_initializer=initializer,
                name=f"separable{b}_{i}",
            )(x)
        x = layers.MaxPooling2D(2, name=f"pool{b}")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(512, activation=activation, kernel_initializer=initializer, name="dense")(x)
    return keras.Model(image, logits(x, num_classes, initializer), name="separable_cnn")


def _depthwise(name: str) -> keras.initializers.Initializer:
    """A new initializer for each layer, since one object draws the same numbers every time it is called."""
    if name == "unit_gain":
        return keras.initializers.RandomNormal(stddev=1 / KERNEL)
    return keras.initializers.get(name)
