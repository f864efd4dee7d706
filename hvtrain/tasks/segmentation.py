"""The task of predicting a class for each pixel, and its figures for the report."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from PIL import ImageColor

from hvtrain.core.figures import Figure, Pictures, Table
from hvtrain.data.pipeline.streams import StreamedSource
from hvtrain.data.pipeline.transform import IGNORED
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError
from hvtrain.tasks.classification import output_names
from hvtrain.tasks.examples import Columns, ReviewedExamples, as_bytes, png
from hvtrain.tasks.task import ClassTask, Losses, Metrics

NUM_PICTURES = 6
# Colors of the classes from 1 on. Class 0, often the background, is not painted. If there are more
# classes than colors, the colors repeat.
COLORS = ("#e07b39", "#1f6fb4", "#4c9f70", "#b5489b", "#d3b22f", "#5bb5c9", "#8a63c4", "#c0504d")


class Segmentation(ClassTask):
    """One class per pixel: the model outputs a logit for each class at each pixel.

    Targets are masks [height, width] of class indices.

    Args:
        loss: Default: cross-entropy of the logits, over the pixels that count.
        metrics, best: Default: mean IoU (intersection over union), over the pixels that count.
        ignored_label: The label of pixels that do not count, such as 255 in PASCAL VOC. None: all
            pixels count.

    Example:

    >>> logits = np.array([[[[0.1, 0.9], [0.7, -0.2]]]])  # One image of 1 x 2 pixels, two classes.
    >>> Segmentation().decode(logits)
    array([[[1, 0]]])
    """

    name = "segmentation"
    target = "a mask [height, width] of whole numbers"
    output = "logits of each pixel; keras.ops.softmax makes them probabilities"
    head = "keras.layers.Conv2D({0}, 1) at the size of the image"
    best = "mean_iou"
    target_rank = 2
    has_classes = True
    targets_are_masks = True
    num_reviewed = 200

    def __init__(self, *args: Any, ignored_label: int | None = IGNORED, **kwargs: Any) -> None:
        self.ignored_label = ignored_label
        super().__init__(*args, **kwargs)

    def default_loss(self) -> Losses:
        return keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=self.ignored_label
        )

    def default_metrics(self) -> Metrics:
        # A partial, because num_classes is known only from the data set; see Task.complete.
        iou = partial(
            keras.metrics.MeanIoU,
            sparse_y_pred=False,
            ignore_class=self.ignored_label,
            # By default Keras counts in int32, which cuts weights to whole numbers and
            # overflows at 2**31 pixels: 8,192 images of 512 x 512.
            dtype="float64",
        )
        return {"mean_iou": iou}

    def check_targets(self, source: Source) -> None:
        super().check_targets(source)
        fills_masks = isinstance(source, StreamedSource) and source.fills_masks
        if fills_masks and self.ignored_label != IGNORED:
            label = "null" if self.ignored_label is None else self.ignored_label
            raise ConfigError(
                f"task.ignored_label={label}, but {source.name} fills the borders of masks with {IGNORED}; set "
                f"task.ignored_label={IGNORED}, or dataset.shift_pixels=0 and a dataset.fit other than pad"
            )
        image, mask = source.element_spec[:2]
        if getattr(image, "shape", None) is None:
            return  # If there are several inputs, any of them may be the image.

        image_size = tuple(image.shape[:2])
        mask_size = tuple(mask.shape)
        if image_size != mask_size:
            raise ConfigError(
                f"task=segmentation needs masks of the size of the images, and {source.name} gives "
                f"images of {image_size} and masks of {mask_size}; resize one of them"
            )

    def columns(self, outputs: np.ndarray, source: Source) -> Columns:
        return {"mask": self.decode(outputs)}

    def review(
        self, reviewed: ReviewedExamples, model: keras.Model, source: Source
    ) -> list[Figure]:
        """Returns a table of IoU by class and, if the inputs are images, pictures of some masks."""
        targets = reviewed.targets
        predicted = self.decode(reviewed.outputs)
        names = output_names(source, reviewed.outputs.shape[-1])

        is_counted = targets != self.ignored_label
        matrices = [
            tf.math.confusion_matrix(target[pixels], prediction[pixels], len(names))
            for target, prediction, pixels in zip(targets, predicted, is_counted)
        ]
        # Numbers of pixels that count: [examples, true classes, predicted classes].
        confusion = np.stack(matrices)
        # Numbers of pixels in both masks, and in at least one of them: [examples, classes].
        intersection = confusion.diagonal(axis1=1, axis2=2)
        union = confusion.sum(axis=1) + confusion.sum(axis=2) - intersection

        # A class that occurs nowhere has no IoU.
        rows = [
            [name, f"{correct / covered:.3f}" if covered else "does not occur", int(correct)]
            for name, correct, covered in zip(names, intersection.sum(axis=0), union.sum(axis=0))
        ]
        note = f"Intersection over union of each class's pixels, in {reviewed.description}."
        figures: list[Figure] = [Table("Overlap", note, ["class", "IoU", "correct pixels"], rows)]
        if reviewed.has_images:
            # The mean IoU of an example is over the classes that occur in either of its masks.
            iou = intersection / np.maximum(union, 1)
            mean_iou = iou.sum(axis=1) / np.maximum((union > 0).sum(axis=1), 1)
            figures.append(_overlays(reviewed, predicted, mean_iou, self.ignored_label, names))
        return figures


def _overlays(
    reviewed: ReviewedExamples,
    predicted: np.ndarray,
    mean_iou: np.ndarray,
    ignored_label: int | None,
    names: Sequence[str],
) -> Figure:
    """Returns pictures of the worst examples, then of the first others: image, true mask and predicted mask.

    Args:
        reviewed: The examples; their inputs are images.
        predicted: Predicted class indices [examples, height, width].
        mean_iou: Mean IoU of each example.
        ignored_label: The label of pixels that do not count, if any.
        names: The names of the classes, by index.
    """
    # The worst examples show where the model fails, and the first ones show its typical output. A
    # stable sort keeps ties in the order of the examples.
    worst = np.argsort(mean_iou, kind="stable").tolist()[: NUM_PICTURES // 2]
    others = [row for row in range(len(mean_iou)) if row not in worst]

    pictures = []
    for row in [*worst, *others][:NUM_PICTURES]:
        image = as_bytes(reviewed.inputs[row])
        masks = (reviewed.targets[row], predicted[row])
        overlays = [overlay(image, mask, ignored_label) for mask in masks]
        caption = f"example {row * reviewed.step}: mean IoU {mean_iou[row]:.2f}"
        pictures.append((png(image, *overlays), caption))

    note = f"Image, true mask, predicted mask: the worst {len(worst)} of {reviewed.description}, then the first ones."
    legend = [(name, overlay_color(label)) for label, name in enumerate(names) if label]
    return Pictures("Masks", note, pictures, legend, panels=3)


def overlay_color(label: int) -> str:
    """Returns the color of a class above 0 in an overlay, as #rrggbb."""
    return COLORS[(label - 1) % len(COLORS)]


def overlay(image: np.ndarray, mask: np.ndarray, ignored_label: int | None) -> np.ndarray:
    """Paints the classes of a mask [height, width] over a uint8 image [height, width, 3].

    Pixels with the ignored label become white.
    """
    painted = image.astype(np.float64)

    for label in np.unique(mask):
        pixels = mask == label
        if label == ignored_label:
            painted[pixels] = 255
        elif label:
            rgb = np.array(ImageColor.getrgb(overlay_color(label)))
            # Blended, so that the image stays visible through the color.
            painted[pixels] = 0.35 * painted[pixels] + 0.65 * rgb

    return painted.astype(np.uint8)
