"""Figures of what `inspect` found in a data set: tables, pictures with masks, texts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvtrain.checks.examine_data import Findings, SplitFacts
from hvtrain.core.figures import Figure, Pictures, Table, Texts
from hvtrain.data.description import percent
from hvtrain.data.kinds import inputs_of
from hvtrain.data.pipeline.transform import IGNORED
from hvtrain.data.source import Source
from hvtrain.tasks.reviewed import as_bytes, png
from hvtrain.tasks.segmentation import overlay, overlay_color

MAX_ROWS = 40
NUM_MASKS = 6
NUM_TEXTS = 3
SHOWN_CHARACTERS = 400
SHOWN_NUMBERS = 8


def figures_of(findings: Findings) -> list[Figure]:
    """The figures of the page, those that the data have something for."""
    figures: list[Figure] = []
    for facts in findings.splits[:1]:
        figures += [*_pictures(facts, findings.class_names), *_texts(facts, findings.source)]
    return [*figures, *tables_of(findings), *_rows(findings.raw_rows)]


def tables_of(findings: Findings) -> list[Table]:
    """The values of each split, and the classes if there are any."""
    columns = ["split", "what", "kind", "lowest", "highest", "mean"]
    rows = []
    for facts in findings.splits:
        for name, values in list(facts.values.items())[:MAX_ROWS]:
            cells = [facts.name, name, ", ".join([values.kind, " x ".join(map(str, values.shape))]).rstrip(", ")]
            if values.num_finite:
                cells += [f"{values.low:.4g}", f"{values.high:.4g}"]
            # The mean of the numbers of classes or tokens would mean nothing.
            if values.num_finite and values.kind == "numbers":
                cells.append(f"{values.total / values.num_finite:.4g}")
            rows.append([*cells, "", "", ""][: len(columns)])
    tables = [Table("Inputs and targets", f"As the model gets them. {scope(findings)}", columns, rows)]

    splits = [facts for facts in findings.splits if facts.class_counts is not None]
    if splits:
        counts = np.stack([facts.class_counts for facts in splits])  # type: ignore[misc]
        totals = np.maximum(counts.sum(axis=1), 1)
        rows = []
        for name, by_split in list(zip(findings.class_names, counts.T))[:MAX_ROWS]:
            shares = map(percent, by_split / totals)
            rows.append([name, *(f"{count:,} ({share})" for count, share in zip(by_split, shares))])
        note = f"Examples of each class (of masks, pixels). {scope(findings)}"
        if len(findings.class_names) > MAX_ROWS:
            note += f" The first {MAX_ROWS} of {len(findings.class_names):,} classes."
        tables.append(Table("Classes", note, ["class", *(facts.name for facts in splits)], rows))
    return tables


def scope(findings: Findings) -> str:
    """The examples that were read, in a sentence."""
    if all(facts.num_read == facts.num_examples for facts in findings.splits):
        return "All examples were read."
    parts = [f"{facts.num_read:,} of {facts.num_examples:,} {facts.name}" for facts in findings.splits]
    return f"Read: {', '.join(parts)} examples."


def _rows(raw_rows: Sequence[dict[str, Any]]) -> list[Figure]:
    """The first rows of a table, each a column of the page, since a table may have many columns."""
    if not raw_rows:
        return []
    rows = [[name, *(_cell(row[name]) for row in raw_rows)] for name in list(raw_rows[0])[: 5 * MAX_ROWS]]
    columns = ["column", *(f"row {number}" for number in range(len(raw_rows)))]
    return [Table("First training rows", "As the saved model takes them.", columns, rows)]


def _cell(values: Any) -> str:
    return ", ".join(tf.compat.as_str_any(value) for value in np.ravel(values)[:SHOWN_NUMBERS])


def _pictures(facts: SplitFacts, class_names: Sequence[str]) -> list[Figure]:
    """Images with their classes, or with their masks beside them."""
    pictures = []
    has_masks = False
    for number, inputs, target in facts.shown:
        arrays = map(np.asarray, inputs_of(inputs).values())
        image = next((array for array in arrays if array.ndim == 3 and array.shape[-1] in (1, 3)), None)
        if image is None:
            return []
        pixels = as_bytes(image)
        caption = f"{number * facts.step}"
        has_masks = np.shape(target) == image.shape[:2]
        if has_masks:
            gap = np.full((len(pixels), max(1, pixels.shape[1] // 24), 3), 255, np.uint8)
            pixels = np.concatenate([pixels, gap, overlay(pixels, target, IGNORED)], axis=1)
        elif not isinstance(target, dict):
            is_class = np.ndim(target) == 0 and class_names and 0 <= target < len(class_names)
            caption += f": {class_names[int(target)] if is_class else _cell(target)}"
        pictures.append((png(pixels, 1 + has_masks), caption))

    if not has_masks:
        return [Pictures("Pictures", f"Of {facts.name}, with their targets.", pictures)]
    legend = [(name, overlay_color(label)) for label, name in enumerate(class_names) if label]
    note = f"Of {facts.name}: the image, and the mask over it. Class 0 is not painted; ignored pixels are white."
    return [Pictures("Pictures and masks", note, pictures[:NUM_MASKS], legend[:MAX_ROWS])]


def _texts(facts: SplitFacts, source: Source) -> list[Figure]:
    """The first texts, from tokens or as they are."""
    pairs = []
    for number, inputs, _ in facts.shown[:NUM_TEXTS]:
        arrays = list(map(np.asarray, inputs_of(inputs).values()))
        text = "\n".join(_cell(array) for array in arrays if array.dtype.kind in "OSU")
        if len(arrays) == 1 and arrays[0].ndim == 1 and arrays[0].dtype.kind in "iu":
            text = source.text_of(arrays[0].tolist()) or ""
        if text:
            more = " ..." * (len(text) > SHOWN_CHARACTERS)
            pairs.append((f"{facts.name} {number * facts.step}", text[:SHOWN_CHARACTERS] + more))
    return [Texts("Texts", "The first examples.", pairs, goes_on=False)] if pairs else []
