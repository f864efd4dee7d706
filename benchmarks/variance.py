"""Signal strength in each layer of an untrained network: the first thing to check if a network does not train.

    python -m benchmarks.variance separable_cnn depthwise_initializer=lecun_normal

prints, layer by layer, the mean and variance of the output (forward) and the size of the gradient (backward).
Both should stay within a few powers of ten from end to end; docs/separable.md explains such tables. The images are
standard-normal noise, or with --dataset the first training batch of that data set.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from omegaconf import OmegaConf

from hvtrain import models
from hvtrain.core.topology import Topology
from hvtrain.data.source import StreamRequest
from hvtrain.data.sources.cifar10 import cifar10
from hvtrain.data.sources.digits import digits
from hvtrain.data.sources.mnist import fashion_mnist, mnist
from hvtrain.errors import UserError

DATASETS: dict[str, Any] = {
    "cifar10": cifar10,
    "digits": digits,
    "fashion_mnist": fashion_mnist,
    "mnist": mnist,
}


@dataclass(frozen=True)
class LayerSignal:
    """Output of one layer over a batch, and the gradient of the loss with respect to its weights."""

    layer: str
    mean: float
    variance: float
    gradient_rms: float | None  # Root mean square over the layer's weights; None if it has none.


def signals(model: keras.Model, images: np.ndarray, labels: np.ndarray) -> list[LayerSignal]:
    """Measures each layer of a functional model on one batch, as in training, with cross-entropy on its logits."""
    inner = [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
    probe = keras.Model(model.input, [layer.output for layer in inner])
    weights = model.trainable_variables

    with tf.GradientTape() as tape:
        outputs = probe(images, training=True)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, outputs[-1])

    gradients = tape.gradient(loss, [weight.value for weight in weights])
    by_path = {weight.path: np.asarray(gradient) for weight, gradient in zip(weights, gradients, strict=True)}
    return [
        LayerSignal(
            layer=layer.name,
            mean=float(np.mean(output, dtype=np.float64)),
            variance=float(np.var(output, dtype=np.float64)),
            gradient_rms=_rms([by_path[weight.path].ravel() for weight in layer.trainable_variables]),
        )
        for layer, output in zip(inner, outputs, strict=True)
    ]


def _rms(arrays: Sequence[np.ndarray]) -> float | None:
    if not arrays:
        return None
    values = np.concatenate(arrays).astype(np.float64)
    return float(np.sqrt(np.mean(values**2)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.variance", description=__doc__.split("\n")[0])
    parser.add_argument("network", choices=sorted({*models.__all__} - {"transformer"}))
    parser.add_argument("options", nargs="*", help="options of the network, as in conf/model: key=value")
    parser.add_argument("--dataset", choices=sorted(DATASETS), help="real images; without it: noise")
    parser.add_argument("--image-shape", type=int, nargs=3, default=(28, 28, 1), metavar=("H", "W", "C"))
    parser.add_argument("--num-images", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_intermixed_args(arguments)

    keras.utils.set_random_seed(args.seed)
    try:
        if args.dataset:
            request = StreamRequest(Topology(), args.num_images, args.seed, start_step=0, steps_per_epoch=1)
            images, labels = next(DATASETS[args.dataset]().training(request).as_numpy_iterator())
        else:
            images = np.random.standard_normal((args.num_images, *args.image_shape))
            labels = np.random.randint(0, 10, args.num_images)
        options: Any = OmegaConf.to_container(OmegaConf.from_dotlist(args.options))
        model = getattr(models, args.network)(images.shape[1:], num_outputs=10, **options)
    except (UserError, TypeError) as error:
        parser.error(str(error))

    print(f"{'layer':<24}{'mean':>11}{'variance':>11}{'gradient rms':>14}")
    print(f"{'(image)':<24}{images.mean():>11.3f}{images.var():>11.2e}")
    for signal in signals(model, images, labels):
        gradient = "" if signal.gradient_rms is None else f"{signal.gradient_rms:>14.1e}"
        print(f"{signal.layer:<24}{signal.mean:>11.3f}{signal.variance:>11.2e}{gradient}")


if __name__ == "__main__":
    main()
