"""Figures and lines of what `inspect` found in a data set: tables, pictures with masks, texts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvtrain.checks.examine_data import Findings, SplitFacts, Values
from hvtrain.core.figures import Figure, Pictures, Table, Texts
from hvtrain.data.description import percent
from hvtrain.data.kinds import inputs_of
from hvtrain.data.source import Source
from hvtrain.system.text import format_known
from hvtrain.tasks.reviewed import as_bytes, png
from hvtrain.tasks.segmentation import overlay, overlay_color

MAX_CLASSES = 30
MAX_INPUTS = 40
NUM_MASKS = 6
NUM_TEXTS = 3
SHOWN_CHARACTERS = 400


def figures_of(findings: Findings, source: Source) -> list[Figure]:
    """The figures of the page, those that the data have something for."""
    train = next((facts for facts in findings.splits if facts.shown), None)
    figures: list[Figure | None] = [
        values_table(findings),
        class_table(findings),
        _rows(findings),
    ]
    if train:
        figures = [_pictures(train, findings), _texts(train, source), *figures]
    return [figure for figure in figures if figure is not None]


def values_table(findings: Findings) -> Table | None:
    """A row for each input and target of each split: type, shape and range."""
    rows = []
    for facts in findings.splits:
        for name, values in list(facts.values.items())[:MAX_INPUTS]:
            rows.append([facts.name, name, _kind(values), *_range(values), format_known(values.mean, ".4g", "")])
    if not rows:
        return None
    columns = ["split", "what", "kind", "lowest", "highest", "mean"]
    return Table("Inputs and targets", f"As the model gets them. {scope(findings)}", columns, rows)


def class_table(findings: Findings) -> Table | None:
    """A row for each class, with its examples in each split."""
    splits = [facts for facts in findings.splits if facts.class_counts is not None]
    if not splits:
        return None
    counts = np.stack([facts.class_counts for facts in splits])  # type: ignore[misc]
    totals = np.maximum(counts.sum(axis=1), 1)
    rows = []
    for label, name in enumerate(findings.class_names[:MAX_CLASSES]):
        cells = [f"{count:,} ({percent(count / total)})" for count, total in zip(counts[:, label], totals)]
        rows.append([name, *cells])

    num_hidden = len(findings.class_names) - MAX_CLASSES
    more = f" {num_hidden:,} more classes are not shown." if num_hidden > 0 else ""
    unit = "Pixels" if any(len(values.shape) > 1 for values in _targets(splits)) else "Examples"
    note = f"{unit} of each class. {scope(findings)}{more}"
    return Table("Classes", note, ["class", *(facts.name for facts in splits)], rows)


def scope(findings: Findings) -> str:
    """The examples that were read, in a sentence."""
    if all(facts.num_read == facts.num_examples for facts in findings.splits):
        return "All examples were read."
    parts = [f"{facts.num_read:,} of {facts.num_examples:,} {facts.name}" for facts in findings.splits]
    return f"Read: {', '.join(parts)} examples."


def _targets(splits: Sequence[SplitFacts]) -> list[Values]:
    return [values for facts in splits for name, values in facts.values.items() if name.startswith("targets")]


def _kind(values: Values) -> str:
    shape = " x ".join(map(str, values.shape))
    return f"{values.kind}, {shape}" if shape else values.kind


def _range(values: Values) -> tuple[str, str]:
    if not np.isfinite(values.low):
        return "", ""
    return f"{values.low:.4g}", f"{values.high:.4g}"


def _rows(findings: Findings) -> Table | None:
    """The first rows of a table, a column of the page for each row, since a table may have many columns."""
    if not findings.raw_rows:
        return None
    names = list(findings.raw_rows[0])[: 5 * MAX_INPUTS]
    rows = [[name, *(_cell(row[name]) for row in findings.raw_rows)] for name in names]
    columns = ["column", *(f"row {number}" for number in range(len(findings.raw_rows)))]
    return Table("First training rows", "As the saved model takes them.", columns, rows)


def _cell(values: Any) -> str:
    array = np.asarray(values).ravel()
    cells = []
    for value in array[:4].tolist():
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        cells.append(f"{value:.6g}" if isinstance(value, float) else text)
    return ", ".join(cells) + (" ..." if array.size > 4 else "")


def _pictures(facts: SplitFacts, findings: Findings) -> Figure | None:
    """Images with their classes, or with their masks beside them."""
    pictures = []
    has_masks = False
    for number, inputs, target in facts.shown:
        image = _image(inputs)
        if image is None:
            return None
        pixels = as_bytes(image)
        has_masks = isinstance(target, np.ndarray) and target.shape == image.shape[:2] and target.ndim == 2
        if has_masks:
            # 255 marks pixels that do not count, if there are not as many classes.
            painted = overlay(pixels, target, 255 if len(findings.class_names) <= 255 else None)
            gap = np.full((len(pixels), max(1, pixels.shape[1] // 24), 3), 255, np.uint8)
            pixels = np.concatenate([pixels, gap, painted], axis=1)
        caption = f"{number * facts.step}: {_target_text(target, findings.class_names)}".removesuffix(": ")
        pictures.append((png(pixels, 2 if has_masks else 1), caption))

    if not has_masks:
        return Pictures("Pictures", f"Of {facts.name}, with their targets.", pictures)
    legend = [(name, overlay_color(label)) for label, name in enumerate(findings.class_names) if label]
    note = f"Of {facts.name}: the image, and the mask over it. Class 0 is not painted; ignored pixels are white."
    return Pictures("Pictures and masks", note, pictures[:NUM_MASKS], legend[:MAX_CLASSES])


def _image(inputs: Any) -> np.ndarray | None:
    """The first input that is a grey or RGB image."""
    for array in inputs_of(inputs).values():
        array = np.asarray(array)
        if array.ndim == 3 and array.shape[-1] in (1, 3) and array.dtype.kind in "uif":
            return array
    return None


def _target_text(target: Any, class_names: Sequence[str]) -> str:
    array = np.asarray(target) if not isinstance(target, dict) else np.empty(0)
    if array.ndim == 0 and array.dtype.kind in "iu" and 0 <= array < len(class_names):
        return class_names[int(array)]
    return _cell(array) if 0 < array.size <= 16 else ""


def _texts(facts: SplitFacts, source: Source) -> Figure | None:
    """The first texts, from tokens or as they are."""
    pairs = []
    for number, inputs, _ in facts.shown[:NUM_TEXTS]:
        text = _text(inputs, source)
        if text is None:
            return None
        shown = text[:SHOWN_CHARACTERS] + (" ..." if len(text) > SHOWN_CHARACTERS else "")
        pairs.append((f"{facts.name} {number * facts.step}", shown))
    return Texts("Texts", "The first examples.", pairs, goes_on=False)


def _text(inputs: Any, source: Source) -> str | None:
    arrays = [np.asarray(array) for array in inputs_of(inputs).values()]
    if len(arrays) == 1 and arrays[0].ndim == 1 and arrays[0].dtype.kind in "iu":
        return source.text_of(arrays[0].tolist())
    texts = [_cell(array) for array in arrays if array.dtype.kind in "OSU"]
    return "\n".join(texts) or None
