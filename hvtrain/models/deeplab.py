"""DeepLabv3+ for semantic segmentation, on backbones from keras.applications.

Follows Chen et al. 2018, "Encoder-Decoder with Atrous Separable Convolution for Semantic Image
Segmentation" (arXiv:1802.02611), called "the paper" here.
"""

from collections.abc import Sequence
from typing import Any

import keras
from keras import Model, layers

from hvtrain.config.validate import nearest
from hvtrain.errors import ConfigError
from hvtrain.models.networks import body, clone

# By backbone: the layer that outputs its low-level features, at a quarter of the image's size, and the
# layer that outputs its high-level features.
FEATURE_LAYERS = {
    "ResNet50": ("conv2_block3_out", "conv5_block3_out"),
    "ResNet101": ("conv2_block3_out", "conv5_block3_out"),
    # As in the authors' code: block 2 before its projection, and the network without its last
    # convolution (to 1,280 channels).
    "MobileNetV2": ("block_2_depthwise_relu", "block_16_project_BN"),
}

# Number of filters for the low-level features. With more, they would outweigh the pyramid's features
# (table 1 of the paper).
LOW_FILTERS = 48


def deeplabv3plus(
    image_shape: Sequence[int],
    num_outputs: int,
    backbone: str = "ResNet50",
    output_stride: int = 16,
    filters: int = 256,
    atrous_rates: Sequence[int] | None = None,
    dropout: float = 0.1,
    norm_momentum: float = 0.9,
    **options: Any,
) -> Model:
    """Builds DeepLabv3+: backbone, atrous spatial pyramid pooling, decoder, and bilinear upsampling.

    Outputs logits of shape [batch, height, width, num_outputs]. The backbone's layers keep the names
    and the weight shapes of keras.applications. Where the features would become coarser than
    output_stride, strides are removed and later convolutions dilated instead, so that each kernel sees
    the pixels that it saw before, but at more positions.

    Args:
        image_shape: (height, width, channels).
        num_outputs: number of classes, each with a logit at each pixel.
        backbone: a key of FEATURE_LAYERS.
        output_stride: pixels of the image per feature of the backbone, along a side; 8 is finer than
            16 and costs more memory and time; 32 leaves the backbone unchanged.
        filters: number of filters in the pyramid and the decoder.
        atrous_rates: rates of the pyramid's convolutions, one or more; None: 6, 12, 18 at a stride of
            16, twice that at 8, half at 32. Small images need smaller rates: at a rate as large as
            the feature map, a kernel sees only padding around its center.
        dropout: dropout rate between the pyramid and the decoder.
        norm_momentum: momentum of the moving statistics of all batch normalization layers; 0.9 also
            suits runs of a few hundred steps, for which Keras's 0.99 is too slow.
        options: passed on to the backbone, such as alpha=0.5 for MobileNetV2.

    Raises:
        ConfigError: an unknown backbone or stride, or a momentum that is not between 0 and 1. Keras's
            layers check the other arguments, and raise ValueError or TypeError.
    """
    if backbone not in FEATURE_LAYERS:
        raise ConfigError(
            f"deeplabv3plus was given backbone={backbone}; {nearest(str(backbone), list(FEATURE_LAYERS))}"
        )
    if output_stride not in (8, 16, 32):
        raise ConfigError(
            f"deeplabv3plus was given output_stride={output_stride}; it needs 8, 16 or 32"
        )
    if not 0 < norm_momentum < 1:
        raise ConfigError(
            f"deeplabv3plus was given norm_momentum={norm_momentum}; it needs a number between 0 and 1, such as 0.9"
        )

    image = keras.Input(image_shape, name="image")
    trunk = body(image_shape, backbone, **options)
    # Rebuilds the backbone with its strides limited.
    trunk = clone(trunk, image, dilation_changes(trunk, output_stride))
    low, high = (trunk.get_layer(name).output for name in FEATURE_LAYERS[backbone])

    if atrous_rates is None:
        # 6, 12 and 18 at a stride of 16, doubled at 8, as in DeepLabv3 (Chen et al. 2017,
        # arXiv:1706.05587).
        atrous_rates = [96 // output_stride * factor for factor in (1, 2, 3)]
    x = _pyramid(high, filters, atrous_rates)
    if dropout:
        x = layers.Dropout(dropout, name="aspp_dropout")(x)
    # The decoder: two convolutions after the concatenation, the best choice in the paper.
    low = _pointwise(low, LOW_FILTERS, "decoder_low")
    x = layers.Concatenate(name="decoder_concat")([_resize(x, low.shape), low])
    for number in (1, 2):
        x = _separable(x, filters, 1, f"decoder_separable{number}")
    # In float32 regardless of the dtype policy, as in networks.logits.
    x = layers.Conv2D(num_outputs, 1, dtype="float32", name="logits")(x)
    model = Model(image, _resize(x, image.shape), name="deeplabv3plus")
    # Sets the backbone's momentum too.
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.momentum = norm_momentum
    return model


def dilation_changes(trunk: Model, output_stride: int) -> dict[str, dict[str, Any]]:
    """Returns changes to layer settings, by layer name, that keep all features at least as fine as output_stride.

    A convolution after removed strides is dilated by their product, so that it sees the same pixels as
    before (algorithme à trous).
    """
    stride: dict[str, int] = {}  # The stride of each layer's output, before the changes.
    changes = {}
    for layer in trunk.layers:
        parents = [node.operation for node in layer._inbound_nodes[0].parent_nodes]
        input_stride = max((stride[parent.name] for parent in parents), default=1)
        stride[layer.name] = input_stride * getattr(layer, "strides", (1, 1))[0]
        if stride[layer.name] <= output_stride or not isinstance(
            layer, layers.Conv2D | layers.DepthwiseConv2D
        ):
            continue

        changes[layer.name] = {"strides": 1}
        size = layer.kernel_size[0]
        # A 1x1 kernel needs no dilation.
        if size == 1:
            continue
        # At least 1, since no backbone in FEATURE_LAYERS has a stride above 2.
        rate = input_stride // output_stride
        changes[layer.name]["dilation_rate"] = rate
        if layer.padding == "valid":
            # The preceding padding layer suits the old stride: for a stride of 2 and an even size, it
            # pads asymmetrically.
            (padding,) = parents
            changes[padding.name] = {"padding": rate * (size // 2)}
    return changes


def _pyramid(features, filters: int, rates: Sequence[int]):
    """Applies atrous spatial pyramid pooling: features at several scales, and their mean over the image."""
    branches = [_pointwise(features, filters, "aspp_point")]
    for number, rate in enumerate(rates, start=1):
        branches.append(_separable(features, filters, rate, f"aspp_rate{number}"))
    # Image-level features, as in DeepLabv3: the mean over the image, at each position.
    mean = layers.GlobalAveragePooling2D(keepdims=True, name="aspp_pool")(features)
    mean = _pointwise(mean, filters, "aspp_whole")
    branches.append(_resize(mean, features.shape))
    return _pointwise(layers.Concatenate(name="aspp_concat")(branches), filters, "aspp_project")


def _pointwise(x, filters: int, name: str):
    x = layers.Conv2D(filters, 1, use_bias=False, kernel_initializer="he_normal", name=name)(x)
    return _normalize(x, name)


def _separable(x, filters: int, rate: int, name: str):
    """Applies a depthwise separable 3x3 convolution, normalized after both of its parts, as in the paper."""
    depthwise = f"{name}_depthwise"
    x = layers.DepthwiseConv2D(
        3, padding="same", dilation_rate=rate, use_bias=False, name=depthwise
    )(x)
    return _pointwise(_normalize(x, depthwise), filters, name)


def _normalize(x, name: str):
    x = layers.BatchNormalization(epsilon=1e-5, name=f"{name}_norm")(x)
    return layers.ReLU(name=f"{name}_relu")(x)


def _resize(x, shape: Sequence[int | None]):
    """Resizes bilinearly to the height and width of a shape [batch, height, width, ...].

    keras.layers.Resizing is not used: its call defaults to training=True, which later batch
    normalization layers inherit whenever the model is called without that argument.
    """
    return keras.ops.image.resize(x, shape[1:3], data_format="channels_last")
