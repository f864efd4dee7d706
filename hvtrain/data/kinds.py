"""Records the kind of a run's inputs, and checks that later data are of the same kind.

The manifest tells whether the data are the same, and classes.json whether the classes are. Other
data, used on purpose, must still be of the same kind: numbers stay numbers, and images keep their
channels and range of values. Without this check, the model would accept any data silently.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvtrain.data.description import listed
from hvtrain.data.manifest import refuse_or_warn
from hvtrain.data.source import Source
from hvtrain.errors import in_one_line
from hvtrain.system.files import read_json, write_json

log = logging.getLogger(__name__)

KINDS_FILE = "kinds.json"
# Images count as having another range if their large values differ by more than this factor. The actual
# factor is 255 between 0 ... 1 and 0 ... 255, and 16 between 0 ... 1 and the digits' 0 ... 16. Few
# batches of the same data differ that much in brightness.
RANGE_FACTOR = 12
# The quantile of absolute values that is compared. The maximum says little: with per-pixel
# normalization, border pixels of Fashion-MNIST reach 210, and a batch may have none of them.
LARGE_QUANTILE = 0.99
# The quantile is computed from at most this many values: a batch of large images has many millions.
MAX_VALUES = 100_000
NAMES = "names"
# The type for the kind character of a NumPy dtype; all other kinds are "numbers".
TYPES = dict.fromkeys("OSU", NAMES) | dict.fromkeys("iub", "whole numbers")

# The kind of each input, by name: {"type", "shape", "low", "high", "large"}. The last three may be missing.
Kinds = dict[str, dict[str, Any]]


def inputs_of(inputs: Any) -> dict[str, Any]:
    """Flattens nested inputs (arrays or specs) to a dict by name; a single input has the name ""."""
    return {".".join(map(str, path)): part for path, part in keras.tree.flatten_with_path(inputs)}


def kinds_of(inputs: Any) -> Kinds:
    """Returns the kind of each input in a batch, by name, with the range of its numbers."""
    kinds = {}
    for name, array in inputs_of(inputs).items():
        kind = input_kind(array.dtype, array.shape[1:])
        if array.size and kind["type"] != NAMES:
            step = -(-array.size // MAX_VALUES)
            magnitudes = np.abs(array.ravel()[::step].astype(np.float32))
            kind |= {
                "low": float(np.nanmin(array)),
                "high": float(np.nanmax(array)),
                "large": float(np.nanquantile(magnitudes, LARGE_QUANTILE)),
            }
        kinds[name] = kind
    return kinds


def spec_kinds(source: Source) -> Kinds:
    """Returns the kinds of a source's inputs without reading any; value ranges are left out."""
    return {
        name: input_kind(np.dtype(spec.dtype.as_numpy_dtype), spec.shape)
        for name, spec in inputs_of(source.element_spec[0]).items()
    }


def input_kind(dtype: np.dtype[Any], shape: Iterable[int]) -> dict[str, Any]:
    """Returns the kind of an input whose examples have this type and shape."""
    return {"type": TYPES.get(dtype.kind, "numbers"), "shape": list(shape)}


def changes(old: Kinds, new: Kinds) -> list[str]:
    """Describes how inputs differ in kind from those of a run; the size of images does not count.

    >>> old = {"": {"type": "numbers", "shape": [8, 8, 1], "low": 0.0, "high": 1.0, "large": 0.9}}
    >>> new = {"": {"type": "numbers", "shape": [8, 8, 3], "low": 0.0, "high": 255.0, "large": 250.0}}
    >>> changes(old, new)
    ['images have 3 channels, had 1', 'values are 0 to 255, were 0 to 1']
    """
    texts = []
    for name, before in old.items():
        now = new.get(name)
        prefix = f"{name}: " if name else ""
        if now is None:
            texts.append(f"the input {name or 'array'} is missing")
            continue
        is_image = len(before["shape"]) == len(now["shape"]) == 3
        types = {now["type"], before["type"]}
        # Images may come as bytes or as fractions; their ranges are compared below.
        if len(types) > 1 and (NAMES in types or not is_image):
            texts.append(f"{prefix}inputs are {now['type']}, were {before['type']}")
        elif is_image:
            channels = [kind["shape"][-1] for kind in (now, before)]
            if channels[0] != channels[1]:
                texts.append(f"{prefix}images have {channels[0]} channels, had {channels[1]}")
            smaller, larger = sorted(kind.get("large") or 0.0 for kind in (now, before))
            # Black images say nothing about the range, and images of NaN have none.
            if smaller > 0 and larger > RANGE_FACTOR * smaller:
                ranges = [f"{kind['low']:.3g} to {kind['high']:.3g}" for kind in (now, before)]
                texts.append(f"{prefix}values are {ranges[0]}, were {ranges[1]}")
    return texts


def size_advice(run_kinds: Kinds, source: Source) -> str:
    """Returns advice for weights that do not fit; empty if inputs have the shapes of the run."""
    for name, kind in spec_kinds(source).items():
        old_kind = run_kinds.get(name, kind)
        now, then = (" x ".join(map(str, shape)) for shape in (kind["shape"], old_kind["shape"]))
        if now != then:
            return f"; inputs of {source.name} are {now}, were {then}: resize them if the model needs that size"
    return ""


def check(source_name: str, run_kinds: Kinds, new: Kinds, refuse: bool) -> None:
    """Compares inputs with those that a run was trained on.

    Args:
        source_name: Name of the data set, for the message.
        run_kinds: The run's kinds; empty if it has none.
        new: The inputs' kinds, from kinds_of() or spec_kinds().
        refuse: The setting guard.data; if False, warn instead of raising.

    Raises:
        DataError: The inputs are of another kind.
    """
    texts = changes(run_kinds, new)
    if texts:
        refuse_or_warn(
            f"{source_name} differs in kind from the run's training data: {listed(texts, separator='; ')}",
            "convert it",
            refuse,
        )


def keep(run: Path, inputs: Any) -> None:
    """Writes the kinds of a batch of inputs to the run folder (chief only).

    If that fails, only a warning is logged.
    """
    try:
        write_json(run / KINDS_FILE, {"inputs": kinds_of(inputs)})
    except Exception as error:
        log.warning("%s is not written: %s", KINDS_FILE, in_one_line(error))


def read(run: Path) -> Kinds:
    """Reads the kinds of a run; empty if their file is missing or damaged."""
    kinds = read_json(run / KINDS_FILE, dict).get("inputs")
    return kinds if isinstance(kinds, dict) else {}
