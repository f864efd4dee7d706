"""A segmentation's figures in the report: masks over their images, and the overlap of each class."""

from collections.abc import Sequence

import numpy as np

from hvtrain.core.figures import Figure, Pictures, Table
from hvtrain.tasks.reviewed import Reviewed, as_bytes, png

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
