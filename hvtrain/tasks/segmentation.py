"""A class for each pixel."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

from hvtrain.core.figures import Figure, Pictures, Table
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError
from hvtrain.tasks.classification import class_names
from hvtrain.tasks.reviewed import Reviewed, as_bytes, png
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


NUM_PICTURES = 6
# Class 0, often the background, stays as it is.
COLORS = ["#e07b39", "#1f6fb4", "#4c9f70", "#b5489b", "#d3b22f", "#5bb5c9", "#8a63c4", "#c0504d"]
WHITE = np.full(3, 255.0)


def review_masks(
    reviewed: Reviewed, targets: np.ndarray, predicted: np.ndarray, ignored: int | None, names: Sequence[str]
) -> list[Figure]:
    """Figures of masks [examples, height, width] of class indices."""
    counted = np.ones(targets.shape, bool) if ignored is None else targets != ignored
    both, either = np.zeros((2, len(targets), len(names)), np.int64)
    for label in range(len(names)):
        true, taken = (masks == label for masks in (targets, predicted))
        both[:, label] = (true & taken & counted).sum(axis=(1, 2))
        either[:, label] = ((true | taken) & counted).sum(axis=(1, 2))
    figures: list[Figure] = [_overlaps(reviewed, both.sum(axis=0), either.sum(axis=0), names)]
    if reviewed.has_images:
        present = either > 0
        iou = np.where(present, both / np.maximum(either, 1), 0).sum(axis=1) / np.maximum(present.sum(axis=1), 1)
        figures.append(_overlays(reviewed, targets, predicted, iou, ignored, names))
    return figures


def _overlaps(reviewed: Reviewed, both: np.ndarray, either: np.ndarray, names: Sequence[str]) -> Figure:
    rows = [
        [name, f"{shared / whole:.3f}" if whole else "does not occur", int(shared)]
        for name, shared, whole in zip(names, both, either)
    ]
    note = f"Intersection over union of each class's pixels, in {reviewed.which}."
    return Table("Overlap", note, ["class", "IoU", "correct pixels"], rows)


def _overlays(
    reviewed: Reviewed,
    targets: np.ndarray,
    predicted: np.ndarray,
    iou: np.ndarray,
    ignored: int | None,
    names: Sequence[str],
) -> Figure:
    order = [int(row) for row in np.argsort(iou, kind="stable")]
    first = order[: NUM_PICTURES // 2]
    chosen = [*first, *(row for row in range(len(iou)) if row not in first)][:NUM_PICTURES]
    pictures = []
    for row in chosen:
        image = as_bytes(reviewed.inputs[row])
        panels = [image, *(_overlay(image, masks[row], ignored, len(names)) for masks in (targets, predicted))]
        gap = np.full((image.shape[0], max(1, image.shape[1] // 24), 3), 255, np.uint8)
        whole = np.concatenate([panels[0], gap, panels[1], gap, panels[2]], axis=1)
        pictures.append((png(whole, len(panels)), f"example {row}: mean IoU {iou[row]:.2f}"))
    note = f"Image, true mask, predicted mask: the worst {len(first)} of {reviewed.which}, then the first ones."
    legend = [(name, COLORS[(label - 1) % len(COLORS)]) for label, name in enumerate(names) if label]
    return Pictures("Masks", note, pictures, legend)


def _overlay(image: np.ndarray, mask: np.ndarray, ignored: int | None, num_classes: int) -> np.ndarray:
    mixed = image.astype(np.float64)
    for label in range(1, num_classes):
        color = np.array([int(COLORS[(label - 1) % len(COLORS)][i : i + 2], 16) for i in (1, 3, 5)])
        mixed[mask == label] = 0.35 * mixed[mask == label] + 0.65 * color
    if ignored is not None:
        mixed[mask == ignored] = WHITE
    return mixed.astype(np.uint8)
