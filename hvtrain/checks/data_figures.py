"""Figures for the page of `inspect`: tables, pictures with masks, texts."""

from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from hvtrain.checks.examine_data import NUM_DRAWS, Findings, Row, SplitFacts, image_of
from hvtrain.core.figures import Figure, Pictures, Table, Texts
from hvtrain.data.description import percent
from hvtrain.data.kinds import inputs_of
from hvtrain.data.pipeline.transform import IGNORED
from hvtrain.data.source import Source
from hvtrain.tasks.examples import as_bytes, png
from hvtrain.tasks.segmentation import overlay, overlay_color

MAX_ROWS = 40
NUM_TEXTS = 3
SHOWN_CHARACTERS = 400
# A cell may hold a vector, of which at most this many numbers are shown.
SHOWN_NUMBERS = 8


def figures_of(findings: Findings) -> list[Figure]:
    """Returns the figures of the page, without those for which the data set has nothing to show."""
    figures = []
    for facts in findings.splits[:1]:
        if findings.views:
            figures += [_pictures(facts, findings.class_names), _views(findings)]
        figures += _texts(facts, findings.source)
    figures += tables_of(findings)

    raw_rows = findings.raw_rows
    if raw_rows:
        # Transposed, since a table may have many columns.
        names = list(raw_rows[0])[: 5 * MAX_ROWS]
        rows = [[name, *(_cell(row[name]) for row in raw_rows)] for name in names]
        columns = ["column", *(f"row {number}" for number in range(len(raw_rows)))]
        figures.append(
            Table("First training rows", "As the saved model takes them.", columns, rows)
        )
    return figures


def tables_of(findings: Findings) -> list[Table]:
    """Returns a table of the splits' value ranges and, if there are classes, one of the classes' counts."""
    rows = [row for facts in findings.splits for row in _value_rows(facts)]
    columns = ["split", "what", "kind", "lowest", "highest", "mean"]
    tables = [
        Table("Inputs and targets", f"As the model gets them. {scope(findings)}", columns, rows)
    ]

    counts = {
        facts.name: facts.class_counts
        for facts in findings.splits
        if facts.class_counts is not None
    }
    if counts:
        rows = [[name] for name in findings.class_names[:MAX_ROWS]]
        for split_counts in counts.values():
            total = max(split_counts.sum(), 1)
            for row, count in zip(rows, split_counts):
                row.append(f"{count:,} ({percent(count / total)})")
        note = f"Examples of each class (for masks: pixels). {scope(findings)}"
        if len(findings.class_names) > MAX_ROWS:
            note += f" The first {MAX_ROWS} of {len(findings.class_names):,} classes."
        tables.append(Table("Classes", note, ["class", *counts], rows))
    return tables


def _value_rows(facts: SplitFacts) -> Iterable[list[str]]:
    for name, values in list(facts.values.items())[:MAX_ROWS]:
        low = high = mean = ""
        if values.num_finite:
            low = f"{values.low:.4g}"
            high = f"{values.high:.4g}"
            # The mean of class numbers or token ids is meaningless.
            if values.kind.startswith("numbers"):
                mean = f"{values.total / values.num_finite:.4g}"
        yield [facts.name, name, values.kind, low, high, mean]


def scope(findings: Findings) -> str:
    """Returns a sentence that says how many examples were read."""
    if all(facts.num_read == facts.num_examples for facts in findings.splits):
        return "All examples were read."
    parts = (
        f"{facts.num_read:,} of {facts.num_examples:,} {facts.name}" for facts in findings.splits
    )
    return f"Read: {', '.join(parts)} examples."


def _pictures(facts: SplitFacts, class_names: Sequence[str]) -> Figure:
    """Returns a figure of images with their class names or masks."""
    pictures = []
    for number, inputs, target in facts.shown:
        (pixels,) = _with_masks([(inputs, target)])
        caption = f"{number * facts.step}: {_caption(target, class_names)}"
        pictures.append((png(pixels), caption.rstrip(": ")))
    return Pictures("Pictures", f"Examples of {facts.name}, with their targets.", pictures)


def _views(findings: Findings) -> Figure:
    """Returns a figure of training images as training and validation give them to the model."""
    pictures = []
    for view in findings.views:
        _, target = view[-1]
        model_inputs = view[-NUM_DRAWS - 1 :]
        whole_images = [image_of(inputs) for inputs, _ in view[: -len(model_inputs)]]
        panels = [as_bytes(image) for image in whole_images if image is not None]
        panels += _with_masks(model_inputs)
        pictures.append((png(*panels), _caption(target, findings.class_names)))

    # All views have the same form, so the last one determines the note and the number of panels.
    legend = []
    note = "The first training batch, with the augmentation of these settings."
    if len(model_inputs) > 1:
        note = f"The whole image, {NUM_DRAWS} random augmentations of it, and what validation and the saved model see."
    if np.ndim(target) > 1:
        note += " Masks are painted over the images, except for class 0; ignored pixels are white."
        names = findings.class_names[: MAX_ROWS + 1]
        legend = [(name, overlay_color(label)) for label, name in enumerate(names) if label]
    return Pictures("As the model sees them", note, pictures, legend, len(panels))


def _with_masks(rows: Sequence[Row]) -> list[np.ndarray]:
    """Returns the images as uint8, with masks painted on.

    The images are scaled together, so that their brightness can be compared.
    """
    images = np.concatenate([np.asarray(image_of(inputs)) for inputs, _ in rows], axis=1)
    panels = np.split(as_bytes(images), len(rows), axis=1)
    for index, (_, target) in enumerate(rows):
        if np.shape(target) == panels[index].shape[:2]:
            panels[index] = overlay(panels[index], target, IGNORED)
    return panels


def _caption(target, class_names: Sequence[str]) -> str:
    """Returns the target's class name or numbers; empty for masks and for several targets."""
    if isinstance(target, dict) or np.ndim(target) > 1:
        return ""
    if np.ndim(target) == 0 and 0 <= target < len(class_names):
        return class_names[int(target)]
    return _cell(target)


def _cell(values) -> str:
    shown = np.ravel(values)[:SHOWN_NUMBERS]
    suffix = ".0" if shown.dtype.kind == "f" else ""
    return ", ".join(tf.compat.as_str_any(value).removesuffix(suffix) for value in shown)


def _texts(facts: SplitFacts, source: Source) -> list[Figure]:
    """Returns a list with one figure of a split's first texts, decoded if they are tokens; empty without texts."""
    pairs = []
    for number, inputs, _ in facts.shown[:NUM_TEXTS]:
        arrays = list(map(np.asarray, inputs_of(inputs).values()))
        text = "\n".join(_cell(array) for array in arrays if array.dtype.kind in "OSU")
        # A single vector of whole numbers may be tokens; only the data set knows.
        if len(arrays) == 1 and arrays[0].ndim == 1 and arrays[0].dtype.kind in "iu":
            text = source.text_of(arrays[0].tolist()) or ""
        if text:
            if len(text) > SHOWN_CHARACTERS:
                text = f"{text[:SHOWN_CHARACTERS]} ..."
            pairs.append((f"{facts.name} {number * facts.step}", text))
    if not pairs:
        return []
    return [Texts("Texts", "The first examples.", pairs, is_continuation=False)]
