"""A class for each pixel."""

from functools import partial
from typing import Any

import keras
import numpy as np

from hvtrain.core.figures import Figure
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError
from hvtrain.tasks.classification import class_names
from hvtrain.tasks.mask_review import review_masks
from hvtrain.tasks.reviewed import Reviewed
from hvtrain.tasks.task import Losses, Metrics, Task, refuse_targets

CHECKED_SIDE = 4  # Pixels on a side of the masks that metrics are tried with.


class Segmentation(Task):
    """A class for each pixel: the model gives a logit for each class at each pixel, targets are masks of class indices.

    Args:
        loss: default: cross-entropy of the logits, without pixels of the ignored label.
        metrics: default: mean IoU, without pixels of the ignored label.
        ignored_label: pixels of this label do not count; 255 in PASCAL VOC.
    """

    output = "logits of each pixel; keras.ops.softmax makes them probabilities"
    head = "keras.layers.Conv2D({0}, 1) and the size of the image"
    best = "mean_iou"
    has_classes = True
    targets_are_masks = True
    num_reviewed = 200

    def __init__(
        self,
        loss: Losses = None,
        metrics: Metrics | None = None,
        best: str | None = None,
        ignored_label: int | None = 255,
    ) -> None:
        ignored = {"ignore_class": ignored_label}
        iou = partial(keras.metrics.MeanIoU, sparse_y_pred=False, **ignored)
        super().__init__(
            keras.losses.SparseCategoricalCrossentropy(from_logits=True, **ignored) if loss is None else loss,
            {"mean_iou": iou} if metrics is None else metrics,
            best,
        )
        self.ignored_label = ignored_label

    def output_shape(self, source: Source) -> tuple[Any, ...]:
        return *source.element_spec[1].shape, source.fact("num_classes", "task=segmentation")

    def check_targets(self, source: Source) -> None:
        target = source.element_spec[1]
        if not (hasattr(target, "dtype") and target.dtype.is_integer and target.shape.rank == 2):
            raise refuse_targets("segmentation", "a mask [height, width] of whole numbers", source)
        image = source.element_spec[0]
        if getattr(image, "shape", None) is not None and tuple(image.shape[:2]) != tuple(target.shape):
            raise ConfigError(
                f"task=segmentation needs masks of the size of the images, and {source.name} gives images of "
                f"{tuple(image.shape[:2])} and masks of {tuple(target.shape)}; resize one of them"
            )

    def fault(self, targets: np.ndarray, source: Source) -> tuple[int, str] | None:
        wrong = (targets < 0) | (targets >= source.num_classes)
        if self.ignored_label is not None:
            wrong &= targets != self.ignored_label
        if not wrong.any():
            return None
        row = int(np.argmax(wrong.reshape(len(targets), -1).any(axis=1)))
        label = targets[row][wrong[row]][0]
        return row, f"label {label} in its mask is outside 0 ... {source.num_classes - 1}"

    def examples(self, number: int, source: Source) -> tuple[np.ndarray, np.ndarray]:
        rng, classes = np.random.default_rng(0), self.output_shape(source)[-1]
        shape = (number, CHECKED_SIDE, CHECKED_SIDE)
        return rng.integers(classes, size=shape, dtype=np.int32), rng.normal(size=(*shape, classes)).astype(np.float32)

    def decode(self, outputs: np.ndarray) -> np.ndarray:
        return outputs.argmax(axis=-1)

    def review(self, reviewed: Reviewed, model: keras.Model, source: Source) -> list[Figure]:
        names = class_names(source, reviewed.outputs.shape[-1])
        return review_masks(reviewed, reviewed.targets, self.decode(reviewed.outputs), self.ignored_label, names)

    def columns(self, outputs: np.ndarray, source: Source) -> dict[str, np.ndarray]:
        return {"mask": self.decode(outputs)}
