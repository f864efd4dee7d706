"""The kind of a data set's inputs, kept with a run: what later data must be like.

The manifest tells whether the data are the same, and classes.json whether the classes are. Data that
are meant to be others must still be of the same kind: numbers stay numbers, images keep their
channels and the range of their values. They would be predicted without a word otherwise.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvtrain.core.files import read_file, write_atomic
from hvtrain.data.description import DataDescription, class_counts, class_labels, listed, percent
from hvtrain.data.manifest import refuse_or_warn, summarize
from hvtrain.data.source import Source
from hvtrain.errors import DataError, in_one_line

log = logging.getLogger(__name__)

KINDS_FILE = "kinds.json"
RANGE_FACTOR = 12
"""Images whose large values differ by this factor are taken for another range. 0 ... 1 and 0 ... 255
differ by 255, 0 ... 1 and the 0 ... 16 of the digits by 16. A batch that dark by nature is rare."""
LARGE = 0.99
"""The quantile of absolute values that is compared. The largest one says little: normalized by pixel,
the border of Fashion-MNIST reaches 210, and a batch may have none of these pixels."""
MAX_VALUES = 100_000

Kinds = dict[str, Any]
"""{"inputs": {name: {"type", "shape", "low", "high", "large"}}, "class_counts": {split: [...]}}"""


def inputs_of(inputs: Any) -> dict[str, Any]:
    """Arrays, or specs, of a nested structure of inputs by name; "" if there is but one."""
    return {".".join(map(str, path)): part for path, part in keras.tree.flatten_with_path(inputs)}


def kinds_of(inputs: Any) -> dict[str, dict[str, Any]]:
    """The kinds of a batch of inputs, as the model gets them, by name."""
    kinds = {}
    for name, array in inputs_of(inputs).items():
        kinds[name] = input_kind(array)
        if array.size and array.dtype.kind in "iuf":
            some = np.abs(array.ravel()[:: -(-array.size // MAX_VALUES)].astype(np.float32))
            large = float(np.nanquantile(some, LARGE))
            kinds[name] |= {"low": float(np.nanmin(array)), "high": float(np.nanmax(array)), "large": large}
    return kinds


def input_kind(array: np.ndarray) -> dict[str, Any]:
    """The type and the shape of the examples [n, ...] in a batch."""
    return {"type": _type(array.dtype), "shape": list(array.shape[1:])}


def spec_kinds(source: Source) -> dict[str, dict[str, Any]]:
    """The kinds of a source's inputs before any is read: without their ranges."""
    specs = inputs_of(source.element_spec[0])
    return {name: {"type": _type(spec.dtype), "shape": list(spec.shape)} for name, spec in specs.items()}


def _type(dtype: Any) -> str:
    name = getattr(dtype, "name", str(dtype))
    if name in ("string", "object") or name.startswith(("str", "bytes")):
        return "names"
    return "whole numbers" if name.startswith(("int", "uint", "bool")) else "numbers"


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Describes how inputs differ in kind from those of a run; sizes of images do not count.

    >>> old = {"": {"type": "numbers", "shape": [8, 8, 1], "low": 0.0, "high": 1.0, "large": 0.9}}
    >>> new = {"": {"type": "numbers", "shape": [8, 8, 3], "low": 0.0, "high": 255.0, "large": 250.0}}
    >>> changes(old, new)
    ['images have 3 channels, were 1', 'values are 0 to 255, were 0 to 1']
    """
    texts = []
    for name, before in old.items():
        now = new.get(name)
        prefix = f"{name}: " if name else ""
        if now is None:
            texts.append(f"the input {name or 'array'} is missing")
            continue
        is_image = len(before["shape"]) == len(now["shape"]) == 3
        # Pixels are pixels, as bytes or as fractions.
        if now["type"] != before["type"] and not (is_image and "names" not in (now["type"], before["type"])):
            texts.append(f"{prefix}inputs are {now['type']}, were {before['type']}")
            continue
        if is_image and now["shape"][-1] != before["shape"][-1]:
            texts.append(f"{prefix}images have {now['shape'][-1]} channels, were {before['shape'][-1]}")
        if is_image and _range_differs(before, now):
            texts.append(f"{prefix}values are {_range(now)}, were {_range(before)}")
    return texts


def size_advice(kept: Kinds, source: Source) -> str:
    """Advice about images of another size than the run's, for a model that does not fit; empty without."""
    new = spec_kinds(source)
    for name, before in kept.get("inputs", {}).items():
        shape = new.get(name, before)["shape"]
        if len(shape) == 3 and shape[:2] != before["shape"][:2]:
            now, then = (" x ".join(map(str, size[:2])) for size in (shape, before["shape"]))
            return f"; images of {source.name} are {now}, were {then}: resize them if the model needs that size"
    return ""


def _range_differs(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    sizes = before.get("large", 0.0), now.get("large", 0.0)
    # Black images say nothing about the range.
    return min(sizes) > 0 and max(sizes) > RANGE_FACTOR * min(sizes)


def _range(kind: Mapping[str, Any]) -> str:
    return f"{kind['low']:.3g} to {kind['high']:.3g}"


def check(source_name: str, kept: Kinds, new: Mapping[str, Any], refuse: bool) -> None:
    """Compares inputs with those that a run was trained on.

    Args:
        source_name: Of the data set, for the message.
        kept: The run's kinds; empty if it kept none.
        new: Kinds by name, of a batch or of a source.
        refuse: The setting guard.data; False warns instead.

    Raises:
        DataError: They are of another kind.
    """
    texts = changes(kept.get("inputs", {}), new)
    if texts:
        refuse_or_warn(
            f"{source_name} is of another kind than the run was trained on: {summarize(texts)}",
            "convert it",
            DataError if refuse else None,
        )


def warn_of_lost_classes(source: Source, kept: Kinds, split: str) -> None:
    """Warns if a class of the run's split has no example in that split of another data set."""
    old = kept.get("class_counts", {}).get(split, [])
    new = class_counts(source).get(split, [])
    total = sum(old)
    lost = [
        f"{name} ({percent(before / total)} of the run's)"
        for name, before, now in zip(class_labels(source), old, new)
        if before and not now
    ]
    if lost:
        log.warning("%s, %s has no example of %s", source.name, split, listed(lost))


def keep(run: Path, inputs: Any, described: DataDescription) -> None:
    """Writes the kinds into the run folder (chief only). An error is only a warning."""
    kinds = {"inputs": kinds_of(inputs), "class_counts": described.class_counts}
    try:
        write_atomic(run / KINDS_FILE, json.dumps(kinds, indent=1) + "\n")
    except Exception as error:
        log.warning("%s is not written: %s", KINDS_FILE, in_one_line(error))


def read(run: Path) -> Kinds:
    """Reads the kinds of a run; empty for a run without, or with a damaged file."""
    try:
        kinds = json.loads(read_file(run / KINDS_FILE))
        return kinds if isinstance(kinds.get("inputs"), dict) else {}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
