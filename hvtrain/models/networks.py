"""Image networks: small ones for small images, ResNet-50 for ImageNet, and all networks of keras.applications.

The small ones are mlp and cnn for first runs, resnet20, and a separable CNN. Helpers that other
builders share are here too.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import Model, layers, ops

from hvtrain.config.validate import nearest
from hvtrain.errors import ConfigError

# Height, width and channels, or any other shape of an example.
Shape = Sequence[int]

# Filters of resnet20; the second and the third stage begin with a stride of 2.
STAGES = (16, 32, 64)
# Filters of separable_cnn's convolutions; each block ends with pooling.
BLOCKS = ((128,), (256, 256), (512, 512))
# Side of the kernels in every convolution of separable_cnn, in pixels.
KERNEL = 3
# Means and variances of red, green and blue in ImageNet's training images, scaled to 0 ... 1. As in
# fb.resnet.torch, whose preprocessing Goyal et al. follow.
COLOR_MEANS = (0.485, 0.456, 0.406)
COLOR_VARIANCES = (0.229**2, 0.224**2, 0.225**2)


def image_input(image_shape: Shape, network: str, min_side: int) -> Any:
    """Makes the input layer for images of shape (height, width, channels).

    Args:
        image_shape: shape of an image.
        network: name of the network, for the message.
        min_side: the least height and width in pixels.

    Raises:
        ConfigError: the images are smaller than `min_side`.
    """
    height, width, _ = image_shape
    if min(height, width) < min_side:
        raise ConfigError(
            f"{network} was given images of {height}x{width}; it needs {min_side}x{min_side} or "
            "more: choose model=mlp, which takes images of any size, or enlarge the images"
        )
    return keras.Input(image_shape, name="image")


def token_mask(tokens: Any, padding: int) -> Any:
    """Returns a boolean mask of shape [batch, length] that is True where a token is not padding.

    A row that holds nothing but padding keeps all its tokens: a mean over no token would be NaN.
    """
    is_text = ops.not_equal(tokens, padding)
    is_empty = ops.logical_not(ops.any(is_text, axis=1, keepdims=True))
    return ops.logical_or(is_text, is_empty)


def logits(features: Any, num_outputs: int, initializer: Any = "glorot_uniform") -> Any:
    """Adds the dense layer `logits`, without activation; returns float32 logits of shape [..., num_outputs]."""
    # In float32 regardless of the dtype policy, because losses in bfloat16 lose digits.
    return layers.Dense(
        num_outputs, kernel_initializer=initializer, dtype="float32", name="logits"
    )(features)


def check_counts(network: str, **counts: int) -> None:
    """Raises a ConfigError that names the option and the network if a count is below 1."""
    # A loop over a count below 1 would silently do nothing.
    for option, count in counts.items():
        if count < 1:
            raise ConfigError(f"{network} was given {option}={count}; it needs at least 1")


def mlp(
    input_shape: Shape,
    num_outputs: int,
    hidden: Sequence[int] = (128, 64),
    activation: str = "relu",
    dropout: float = 0.0,
) -> Model:
    """Builds a multilayer perceptron, with optional dropout, for images or rows of numbers.

    Args:
        input_shape: shape of an example, with any number of axes.
        num_outputs: number of logits of an example.
        hidden: units of each hidden layer; if empty, the model is a linear or logistic regression.
        activation: Keras name of the hidden layers' activation.
        dropout: fraction dropped after each hidden layer.
    """
    inputs = keras.Input(input_shape, name="image" if len(input_shape) == 3 else "inputs")
    x = layers.Flatten(name="flatten")(inputs)
    for i, units in enumerate(hidden, start=1):
        x = layers.Dense(units, activation=activation, name=f"dense{i}")(x)
        if dropout:
            x = layers.Dropout(dropout, name=f"dropout{i}")(x)
    return Model(inputs, logits(x, num_outputs), name="mlp")


def cnn(image_shape: Shape, num_outputs: int, dropout: Sequence[float] = (0.25, 0.5)) -> Model:
    """Builds the classic Keras MNIST network, for images of 6x6 or more.

    It has 1,199,882 parameters on 28x28x1 with 10 classes.

    Args:
        image_shape: (height, width, channels).
        num_outputs: number of logits of an image.
        dropout: the fractions dropped after the pooling and after the dense layer.
    """
    if len(dropout) != 2:
        raise ConfigError(
            f"cnn was given dropout={list(dropout)}; it needs two fractions, such as [0.25, 0.5]"
        )
    # Each side loses 4 pixels to the two convolutions, and pooling halves the rest: 6 pixels leave 1.
    image = image_input(image_shape, "cnn", min_side=6)
    x = layers.Conv2D(32, 3, activation="relu", name="conv1")(image)
    x = layers.Conv2D(64, 3, activation="relu", name="conv2")(x)
    x = layers.MaxPooling2D(2, name="pool")(x)
    x = layers.Dropout(dropout[0], name="dropout1")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(128, activation="relu", name="dense")(x)
    x = layers.Dropout(dropout[1], name="dropout2")(x)
    return Model(image, logits(x, num_outputs), name="cnn")


def resnet20(image_shape: Shape, num_outputs: int, blocks_per_stage: int = 3) -> Model:
    """Builds the residual network of He et al. 2015 for CIFAR-10, in three stages.

    See arXiv:1512.03385, section 4.2. It has 272,474 trainable parameters on 32x32x3 with 10 classes
    (Keras counts 1,568 more, the moving means and variances). Where a stage changes the shape, the
    shortcut is a 1x1 convolution: the paper's option B, as in most implementations. The paper's own
    CIFAR runs used option A, zero padding, with 2,752 fewer parameters.

    Args:
        image_shape: (height, width, channels).
        num_outputs: number of logits of an image.
        blocks_per_stage: n gives a depth of 6 n + 2, so 3 is ResNet-20 and 9 is ResNet-56.
    """
    check_counts("resnet20", blocks_per_stage=blocks_per_stage)
    image = keras.Input(image_shape, name="image")
    x = _convolve(image, STAGES[0], strides=1, name="conv")
    x = layers.ReLU(name="relu")(x)

    for stage, filters in enumerate(STAGES, start=1):
        for block in range(1, blocks_per_stage + 1):
            strides = 2 if stage > 1 and block == 1 else 1
            x = _residual_block(x, filters, strides, name=f"stage{stage}_block{block}")

    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return Model(
        image, logits(x, num_outputs, "he_normal"), name=f"resnet{6 * blocks_per_stage + 2}"
    )


def _residual_block(x, filters: int, strides: int, name: str):
    shortcut = x
    # Blocks that halve the image also double the filters; all others keep the shape.
    if strides > 1:
        shortcut = _convolve(x, filters, strides, name=f"{name}_shortcut", size=1)

    x = _convolve(x, filters, strides, name=f"{name}_conv1")
    x = layers.ReLU(name=f"{name}_relu1")(x)
    x = _convolve(x, filters, strides=1, name=f"{name}_conv2")
    x = layers.Add(name=f"{name}_add")([x, shortcut])
    return layers.ReLU(name=f"{name}_relu2")(x)


def _convolve(x, filters: int, strides: int, name: str, size: int = 3):
    """Adds a convolution and batch normalization, whose offset makes a bias superfluous."""
    options = {"padding": "same", "use_bias": False, "kernel_initializer": "he_normal"}
    x = layers.Conv2D(filters, size, strides=strides, name=name, **options)(x)
    # Keras's default momentum, 0.99, is too slow for runs of a few hundred steps; 0.9 is common.
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"{name}_norm")(x)


def separable_cnn(
    image_shape: Shape,
    num_outputs: int,
    activation: str = "selu",
    initializer: str = "lecun_normal",
    depthwise_initializer: str = "unit_gain",
) -> Model:
    """Builds a network of separable convolutions for images of 8x8 or more.

    A plain convolution comes before them, and a dense layer after them. The separable convolutions
    follow Chollet 2017, arXiv:1610.02357. The network has 2,887,306 parameters on 28x28x1 with 10
    classes; docs/separable.md trains it.

    Args:
        image_shape: (height, width, channels).
        num_outputs: number of logits of an image.
        activation: Keras name of the activation of all hidden layers.
        initializer: Keras name of the initializer of the plain, pointwise and dense kernels.
        depthwise_initializer: "unit_gain", or a Keras name. Each output of a depthwise kernel sees
            KERNEL**2 = 9 inputs, but Keras computes a fan-in of 9*C from its shape (3, 3, C, 1). With
            lecun, he and glorot the variance of the signal therefore falls by a factor of order C in
            each such layer (keras issue 11773), and after five of them it is too small to train on.
            "unit_gain" draws from a normal distribution with variance 1/9, so that a sum of 9
            inputs keeps their variance.
    """
    # Each block's pooling halves the image.
    image = image_input(image_shape, "separable_cnn", min_side=2 ** len(BLOCKS))
    dense = {"activation": activation, "kernel_initializer": initializer}
    x = layers.Conv2D(128, KERNEL, padding="same", name="conv", **dense)(image)

    for block, block_filters in enumerate(BLOCKS, start=1):
        for number, filters in enumerate(block_filters, start=1):
            x = layers.SeparableConv2D(
                filters,
                KERNEL,
                padding="same",
                activation=activation,
                depthwise_initializer=_depthwise_initializer(depthwise_initializer),
                pointwise_initializer=initializer,
                name=f"separable{block}_{number}",
            )(x)
        x = layers.MaxPooling2D(2, name=f"pool{block}")(x)

    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(512, name="dense", **dense)(x)
    return Model(image, logits(x, num_outputs, initializer), name="separable_cnn")


def _depthwise_initializer(name: str) -> keras.initializers.Initializer:
    # A new object for each layer, since an object draws the same numbers in every call.
    if name == "unit_gain":
        return keras.initializers.RandomNormal(stddev=1 / KERNEL)
    return keras.initializers.get(name)


def application(
    image_shape: Shape, num_outputs: int, name: str, dropout: float = 0.0, **options: Any
) -> Model:
    """Builds keras.applications.<name> with random weights, average pooling, dropout and a dense layer of logits.

    Two things differ from Keras's own network, so it is built once and then cloned layer by layer:
    - rescaling and normalization layers, with which some networks (EfficientNet, ConvNeXt, ...)
      begin, are removed, because the images are normalized already;
    - layers with generated names get the names that they would have in a new process (see _fresh_names).

    Args:
        image_shape: (height, width, channels).
        num_outputs: number of logits of an image.
        name: a function of keras.applications, such as ResNet50.
        dropout: fraction dropped before the dense layer.
        options: passed on to the network, such as alpha=0.5 for MobileNet.

    Raises:
        ConfigError: there is no such network.
        ValueError: the images are smaller than the network takes, usually 32x32 (raised by Keras).
        TypeError: the network has no such option.
    """
    image = keras.Input(image_shape, name="image")
    trunk = body(image_shape, name, pooling="avg", **options)
    x = clone(trunk, image, changes={}).output
    if dropout:
        x = layers.Dropout(dropout, name="dropout")(x)
    return Model(image, logits(x, num_outputs), name=trunk.name)


def resnet50_v1_5(image_shape: Shape, num_outputs: int) -> Model:
    """Builds ResNet-50 for RGB images with values in 0 ... 1, as Goyal et al. 2017 train it on ImageNet.

    See arXiv:1706.02677, section 5.1. It has 25,557,032 trainable parameters with 1000 classes, and
    differs from keras.applications.ResNet50, which follows He et al. 2015, in these points:
    - a stage halves the image in its first 3x3 convolution, not in the 1x1 before it;
    - convolutions have no biases, since batch normalization follows them;
    - the last batch normalization of a block begins with a gamma of 0, so that the block begins as
      its shortcut, which eases the first steps with a large global batch;
    - batch normalization has a momentum of 0.9, not 0.99;
    - convolutions begin with he_normal, and the logits with a standard deviation of 0.01.

    Args:
        image_shape: (height, width, 3).
        num_outputs: number of logits of an image.
    """
    image = keras.Input(image_shape, name="image")
    colors = layers.Normalization(
        mean=COLOR_MEANS, variance=COLOR_VARIANCES, dtype="float32", name="colors"
    )
    trunk = body(image_shape, "ResNet50", pooling="avg", input_tensor=colors(image))

    changes: dict[str, dict[str, Any]] = {colors.name: {}}
    for layer in trunk.layers:
        if isinstance(layer, layers.Conv2D):
            # By name, since one initializer object would give all kernels of a shape the same numbers.
            changes[layer.name] = {"use_bias": False, "kernel_initializer": "he_normal"}
        if isinstance(layer, layers.BatchNormalization):
            gamma = "zeros" if layer.name.endswith("_3_bn") else "ones"
            changes[layer.name] = {"momentum": 0.9, "epsilon": 1e-5, "gamma_initializer": gamma}
    for stage in ("conv3", "conv4", "conv5"):
        changes[f"{stage}_block1_1_conv"]["strides"] = 1
        changes[f"{stage}_block1_2_conv"]["strides"] = 2

    # A list, because that is how Keras keeps the inputs of a network built on an input_tensor.
    x = clone(trunk, [image], changes).output
    x = logits(x, num_outputs, keras.initializers.RandomNormal(stddev=0.01))
    return Model(image, x, name="resnet50_v1_5")


def body(image_shape: Shape, name: str, **options: Any) -> Model:
    """Builds a network of keras.applications without its head, with random weights.

    Raises the same errors as `application`.
    """
    # The functions of keras.applications build networks; its other members are modules.
    networks = dict(inspect.getmembers(keras.applications, inspect.isfunction))
    if name not in networks:
        raise ConfigError(
            f"keras.applications has no network {name!r}; {nearest(name, list(networks))}"
        )
    return networks[name](
        include_top=False, weights=None, input_shape=tuple(image_shape), **options
    )


def clone(trunk: Model, image: Any, changes: Mapping[str, dict[str, Any]]) -> Model:
    """Rebuilds a network of keras.applications on another input, with fresh names.

    Args:
        trunk: a network of keras.applications.
        image: the new input.
        changes: settings to change, by layer name in the trunk. A normalization layer that is named
            here is kept.
    """
    names = _fresh_names(trunk)

    def rebuild(layer):
        name = names.get(layer.name, layer.name)
        if (
            isinstance(layer, (layers.Rescaling, layers.Normalization))
            and layer.name not in changes
        ):
            return layers.Identity(name=name)  # The data set has normalized the images.
        config = layer.get_config() | changes.get(layer.name, {}) | {"name": name}
        return layer.__class__.from_config(config)

    return keras.models.clone_model(trunk, input_tensors=image, clone_function=rebuild)


def _fresh_names(model: Model) -> dict[str, str]:
    """Maps generated layer names (a class and a number) to names that are numbered within the model.

    Keras numbers layers within the process: in a second InceptionV3 the first layer is conv2d_94
    instead of conv2d, so the second model could not load a checkpoint of the first. With numbers
    within the model, both have the same names.
    """
    numbered = defaultdict(list)
    for layer in model.layers:
        prefix, number = re.fullmatch(r"(.*?)(?:_(\d+))?", layer.name).groups()  # type: ignore[union-attr]
        # Keras names a Conv2D conv2d, and a SeparableConv2D separable_conv2d.
        if prefix.replace("_", "") == type(layer).__name__.lower():
            numbered[prefix].append((int(number or 0), layer.name))

    names = {}
    for prefix, old_names in numbered.items():
        for index, (_, old_name) in enumerate(sorted(old_names)):
            names[old_name] = f"{prefix}_{index}" if index else prefix
    return names
