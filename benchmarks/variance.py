"""Signal strength in each layer of an untrained network: the first thing to check if a network does not train.

    python -m benchmarks.variance model=separable_cnn model.depthwise_initializer=lecun_normal dataset=fashion_mnist

prints, layer by layer, the mean and variance of the output (forward) and the size of the gradient (backward) over the
first training batch. Both should stay within a few powers of ten from end to end; docs/separable.md explains such
tables. Takes the settings of a run; dataset=synthetic has standard-normal noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from benchmarks.by_hand.common import make_setup
from hvtrain.system.command import Parser, enter
from hvtrain.system.text import aligned, format_known


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
    by_path = {
        weight.path: np.asarray(gradient)
        for weight, gradient in zip(weights, gradients, strict=True)
    }
    return [
        LayerSignal(
            layer=layer.name,
            mean=float(np.mean(output, dtype=np.float64)),
            variance=float(np.var(output, dtype=np.float64)),
            gradient_rms=_rms(
                [by_path[weight.path].ravel() for weight in layer.trainable_variables]
            ),
        )
        for layer, output in zip(inner, outputs, strict=True)
    ]


def _rms(arrays: Sequence[np.ndarray]) -> float | None:
    if not arrays:
        return None
    values = np.concatenate(arrays).astype(np.float64)
    return float(np.sqrt(np.mean(values**2)))


def main() -> int:
    """Prints the table of the network and the data set that the command line describes."""
    Parser("python -m benchmarks.variance", description=__doc__).parse_with_overrides()
    setup = make_setup()
    images, labels = next(setup.batches_from(0).as_numpy_iterator())

    rows = [
        ["layer", "mean", "variance", "gradient rms"],
        ["(image)", f"{images.mean():.3f}", f"{images.var():.2e}", ""],
    ]
    for signal in signals(setup.model(), images, labels):
        gradient = format_known(signal.gradient_rms, ".1e", missing="")
        rows.append([signal.layer, f"{signal.mean:.3f}", f"{signal.variance:.2e}", gradient])

    print("\n".join(line.rstrip() for line in aligned(rows)))
    return 0


if __name__ == "__main__":
    enter(main)
