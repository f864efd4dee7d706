"""Any network of keras.applications by its name, untrained, with a head for the task; ResNet-50 as for ImageNet."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import layers

from hvtrain.config.validate import nearest
from hvtrain.errors import ConfigError
from hvtrain.models.networks import logits

# Of ImageNet's training images, red, green and blue, scaled to 0 ... 1, as in fb.resnet.torch, whose preprocessing
# Goyal et al. follow.
COLOR_MEANS = (0.485, 0.456, 0.406)
COLOR_VARIANCES = (0.229**2, 0.224**2, 0.225**2)


def application(
    image_shape: Sequence[int],
    num_outputs: int,
    name: str,
    dropout: float = 0.0,
    **options: Any,
) -> keras.Model:
    """keras.applications.<name> with random weights, pooling, dropout and a dense layer of logits.

    Two things differ from Keras's own, so the network is built once and then cloned layer by layer:
    - rescaling and normalization layers, with which some networks (EfficientNet, ConvNeXt ...)
      begin, are removed, because the images are normalized already;
    - layers that Keras named itself get the names that a new process would give them (see
      _fresh_names).

    Args:
        image_shape: (height, width, channels).
        num_outputs: logits of an image.
        name: a function of keras.applications, such as ResNet50.
        dropout: fraction dropped before the dense layer.
        options: passed on to the network, such as alpha=0.5 for MobileNet.

    Raises:
        ConfigError: no such network.
        ValueError: an image smaller than the network takes (usually 32x32), by Keras.
        TypeError: an option that the network does not have.
    """
    image = keras.Input(image_shape, name="image")
    trunk = body(image_shape, name, pooling="avg", **options)
    x = clone(trunk, image).output
    if dropout:
        x = layers.Dropout(dropout, name="dropout")(x)
    return keras.Model(image, logits(x, num_outputs), name=trunk.name)


def resnet50_v1_5(image_shape: Sequence[int], num_outputs: int) -> keras.Model:
    """ResNet-50 as Goyal et al. 2017 train it (arXiv:1706.02677, section 5.1), from RGB images of 0 ... 1.

    25,557,032 trainable parameters on 1000 classes. It differs from keras.applications.ResNet50, which is
    He et al. 2015's, in these points:
    - a stage halves the image in its first 3x3 convolution, not in the 1x1 before it;
    - convolutions have no biases, since batch normalization follows them;
    - the last batch normalization of a block begins with a gamma of 0, so that the block begins as
      its shortcut, which eases the first steps with a large global batch;
    - moving statistics keep 0.9 of themselves in a step, not 0.99.

    Args:
        image_shape: (height, width, 3).
        num_outputs: logits of an image.
    """
    image = keras.Input(image_shape, name="image")
    colors = layers.Normalization(mean=COLOR_MEANS, variance=COLOR_VARIANCES, dtype="float32", name="colors")
    trunk = body(image_shape, "ResNet50", pooling="avg", input_tensor=colors(image))

    changes: dict[str, dict[str, Any]] = {colors.name: {}}
    for layer in trunk.layers:
        if isinstance(layer, layers.Conv2D):
            # By name: an initializer object would give the same numbers to kernels of one shape.
            changes[layer.name] = {"use_bias": False, "kernel_initializer": "he_normal"}
        if isinstance(layer, layers.BatchNormalization):
            gamma = "zeros" if layer.name.endswith("_3_bn") else "ones"
            changes[layer.name] = {"momentum": 0.9, "epsilon": 1e-5, "gamma_initializer": gamma}
    for stage in ("conv3", "conv4", "conv5"):
        changes[f"{stage}_block1_1_conv"]["strides"] = 1
        changes[f"{stage}_block1_2_conv"]["strides"] = 2

    # A list, as Keras gives the inputs of a network that was built on a tensor.
    x = clone(trunk, [image], changes).output
    x = logits(x, num_outputs, keras.initializers.RandomNormal(stddev=0.01))
    return keras.Model(image, x, name="resnet50_v1_5")


def body(
    image_shape: Sequence[int],
    name: str,
    pooling: str | None = None,
    **options: Any,
) -> keras.Model:
    """Builds Keras's own network without its head, with random weights; raises as `application`."""
    networks = dict(inspect.getmembers(keras.applications, inspect.isfunction))
    if name not in networks:
        raise ConfigError(f"keras.applications has no network {name!r}; {nearest(name, list(networks))}")
    return networks[name](
        include_top=False,
        weights=None,
        pooling=pooling,
        input_shape=tuple(image_shape),
        **options,
    )


def clone(
    trunk: keras.Model,
    image: Any,
    changes: Mapping[str, dict[str, Any]] | None = None,
) -> keras.Model:
    """Rebuilds the network on another input, without rescaling, and with fresh names.

    Args:
        trunk: of keras.applications.
        image: the new input.
        changes: settings of layers, by the name that they have in the trunk, to build them with
            others. A normalization that is named here stays.
    """
    names = _fresh_names(trunk)
    changes = changes or {}

    def rebuild(layer: Any) -> Any:
        name = names.get(layer.name, layer.name)
        if isinstance(layer, (layers.Rescaling, layers.Normalization)) and layer.name not in changes:
            return layers.Identity(name=name)  # The data set has normalized the images.
        config = layer.get_config() | changes.get(layer.name, {}) | {"name": name}
        return layer.__class__.from_config(config)

    return keras.models.clone_model(trunk, input_tensors=image, clone_function=rebuild)


def _fresh_names(model: keras.Model) -> dict[str, str]:
    """Returns new names, by old ones, of the layers that Keras named by their class and a number.

    A second InceptionV3 in one process begins at conv2d_94 instead of conv2d, so it could not load
    a checkpoint of the first. Counting within the model gives both the same names.
    """
    numbered: dict[str, list[tuple[int, str]]] = {}
    for layer in model.layers:
        prefix, number = re.fullmatch(r"(.*?)(?:_(\d+))?", layer.name).groups()  # type: ignore[union-attr]
        # Keras names a Conv2D conv2d, and a SeparableConv2D separable_conv2d.
        if prefix.replace("_", "") == type(layer).__name__.lower():
            numbered.setdefault(prefix, []).append((int(number or 0), layer.name))

    names = {}
    for prefix, old_names in numbered.items():
        for index, (_, old_name) in enumerate(sorted(old_names)):
            names[old_name] = f"{prefix}_{index}" if index else prefix
    return names
