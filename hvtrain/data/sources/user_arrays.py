"""Data sets from what a user has in memory: from_arrays for arrays, from_frame for data frames."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvtrain.data.pipeline.transform import check_image_shape
from hvtrain.data.sources.array_kinds import class_targets, names_of, numbered, plain_array
from hvtrain.data.sources.arrays import (
    ArraySource,
    ImagesWithMasks,
    class_indices,
)
from hvtrain.data.sources.memory import MemorySource, known_facts
from hvtrain.errors import ConfigError, DataError


def from_arrays(
    x_train: Any,
    y_train: Any,
    x_test: Any = None,
    y_test: Any = None,
    x_validation: Any = None,
    y_validation: Any = None,
    *,
    w_train: Any = None,
    w_test: Any = None,
    w_validation: Any = None,
    name: str = "arrays",
    images: bool | None = None,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    num_validation: int = 0,
    facts: Mapping[str, Any] | None = None,
    **options,
) -> MemorySource:
    """Makes a source from arrays in memory: x are inputs, y targets and w weights of the examples.

    x, y and w may be arrays [n, ...] or nested structures of them, such as a dict by the names of
    the model's inputs. The caller's arrays stay in memory beside the shard; for large ones give
    MemorySource or ArraySource a function that loads them.

    Example:
        source = from_arrays(x_train, y_train, x_test, y_test, num_validation=5000)

    Args:
        images: True if x are images [n, h, w] or [n, h, w, c], to be normalized and augmented. By
            default they are if x is an array of such a shape, and is of 8-bit numbers or has whole
            numbers as y.
        num_classes: of targets that are one whole number each; by default the largest of y_train +
            1. If it is given, one-hot rows, floats and booleans are classes too, and whole numbers
            [n, h, w] are masks of classes (255: ignored), which augmentation moves with their
            images.
        class_names: by class. Targets of text are numbered by them, by default by the sorted names
            in y_train.
        num_validation: number of examples taken out of the training part at random, with a fixed
            seed.
        facts: more facts for the model's builder and the task, such as vocabulary_size.
        options: those of ArraySource, for images.

    Raises:
        DataError: if arrays do not belong together, or hold neither numbers nor text.
        ConfigError: if there are options for images, and x are none.
    """
    arrays = _arrays_by_split(
        name,
        {
            "train": (x_train, y_train, w_train),
            "validation": (x_validation, y_validation, w_validation),
            "test": (x_test, y_test, w_test),
        },
    )

    # The training part decides what the arrays are.
    x, y = arrays["train"][:2]
    if isinstance(y, np.ndarray) and y.dtype.kind in "US" and y.shape[1:] in ((), (1,)):
        class_names = class_names or names_of(y)
        num_classes = num_classes or len(class_names)
        arrays = {split: _with_classes(name, split, parts, class_names) for split, parts in arrays.items()}
    elif isinstance(y, np.ndarray) and num_classes is not None:
        arrays = {split: _with_numbers(parts, num_classes) for split, parts in arrays.items()}
    x, y = arrays["train"][:2]
    if num_classes is not None and isinstance(y, np.ndarray) and y.dtype.kind == "f" and y.ndim == 1:
        # Raises an error that says what classes are.
        class_indices(y, f"{name}, y_train")
    has_integers = isinstance(y, np.ndarray) and np.issubdtype(y.dtype, np.integer)
    has_labels = has_integers and y.shape[1:] in ((), (1,))
    has_masks = has_integers and y.ndim == 3 and num_classes is not None and images is not False
    if images is None:
        has_image_shape = isinstance(x, np.ndarray) and x.ndim in (3, 4)
        images = has_image_shape and (x.dtype == np.uint8 or has_labels or has_masks)

    # From training alone: the model cannot predict classes that it has never seen.
    if has_labels and num_classes is None:
        num_classes = int(np.max(class_indices(y, f"{name}, y_train"))) + 1

    if images:
        # The caller may have claimed that they are images.
        if not isinstance(x, np.ndarray) or x.ndim not in (3, 4):
            shape = getattr(x, "shape", None)
            shown = "several arrays" if shape is None else shape[1:]
            raise DataError(f"{name}: x_train holds examples of shape {shown}; images [h, w] or [h, w, c] are needed")

        # Images without channels have one.
        height, width, channels = (*x.shape[1:], 1)[:3]
        source_class = ImagesWithMasks if has_masks else ArraySource
        return source_class(
            name,
            lambda: arrays,
            (height, width, channels),
            num_classes,
            num_validation=num_validation,
            class_names=class_names,
            more_facts=facts,
            **options,
        )

    if options:
        raise ConfigError(f"{name}: {', '.join(options)} are for images, and x_train holds none; leave them out")
    if has_labels:
        arrays = {
            split: (
                inputs,
                class_indices(targets, f"{name}, y_{split}"),
                *weights,
            )
            for split, (inputs, targets, *weights) in arrays.items()
        }

    more_facts = known_facts(num_classes, class_names, facts)
    return MemorySource(
        name,
        lambda: arrays,
        num_validation=num_validation,
        more_facts=more_facts,
    )


def _arrays_by_split(
    name: str,
    splits: Mapping[str, tuple[Any, Any, Any]],
) -> dict[str, tuple[Any, ...]]:
    """Returns the splits that were given, each as arrays (x, y) or (x, y, w)."""
    # All splits need elements of one structure: that of train is the source's element_spec.
    has_weights = splits["train"][2] is not None
    arrays = {}
    for split, (x, y, w) in splits.items():
        if (x is None) != (y is None):
            raise DataError(f"{name}: x_{split} and y_{split} belong together; give both or neither")
        if x is None:
            continue
        if (w is not None) != has_weights:
            state = "missing" if has_weights else "there"
            raise DataError(f"{name}: w_{split} is {state}, unlike w_train; weight all or none")

        parts = (x, y, w) if has_weights else (x, y)
        names = (f"{name}, x_{split}", f"{name}, y_{split}", f"{name}, w_{split}")
        # A sparse matrix and a data frame are no structures to tf.nest.
        arrays[split] = tuple(
            tf.nest.map_structure(partial(plain_array, where=where), part) for where, part in zip(names, parts)
        )

    return arrays


def _with_classes(
    name: str,
    split: str,
    parts: tuple[Any, ...],
    class_names: Sequence[str],
) -> tuple[Any, ...]:
    """Returns a split whose targets of text are numbered."""
    inputs, targets, *weights = parts
    return inputs, numbered(targets, class_names, f"{name}, y_{split}"), *weights


def _with_numbers(parts: tuple[Any, ...], num_classes: int) -> tuple[Any, ...]:
    """Returns a split whose targets are whole numbers, if they are clearly classes or masks of them."""
    inputs, targets, *weights = parts
    if isinstance(targets, np.ndarray):
        targets = class_targets(targets, num_classes)
        # Masks may have an axis of one channel, as images have.
        if targets.ndim == 4 and targets.shape[3] == 1 and np.ndim(inputs) == 4:
            targets = targets[..., 0]
        if targets.ndim == 3 and targets.dtype.kind == "b":
            targets = targets.astype(np.uint8)
    return inputs, targets, *weights


def from_frame(
    train: Any,
    test: Any = None,
    validation: Any = None,
    *,
    image_shape: Sequence[int],
    image_column: str | Sequence[str] = "image",
    label_column: str = "label",
    name: str = "frame",
    **options,
) -> MemorySource:
    """Makes a source of images from pandas or Polars DataFrames, or pyarrow Tables.

    Example:
        pixels = [f"pixel{number}" for number in range(784)]
        source = from_frame(train, test, image_shape=[28, 28, 1], image_column=pixels)

    Args:
        train, test, validation: tables whose columns have to_numpy().
        image_shape: [height, width, channels].
        image_column: a column of lists (or arrays) of height * width * channels numbers, or the
            names of as many columns of one number each, as in pixel0 ... pixel783.
        label_column: a column of whole numbers.
        options: those of from_arrays.

    Raises:
        DataError: if a column is missing or holds something else.
    """
    shape = check_image_shape(image_shape)
    arrays: dict[str, Any] = {}
    frames = {"train": train, "test": test, "validation": validation}
    for split, frame in frames.items():
        if frame is not None:
            where = f"{name}, {split}"
            arrays[f"x_{split}"] = _frame_images(where, frame, shape, image_column)
            arrays[f"y_{split}"] = _frame_column(where, frame, label_column)

    # The saved model takes what the user has in the table.
    options.setdefault("example_shape", _example_shape(train, image_column, shape))
    return from_arrays(**arrays, name=name, images=True, **options)


def _frame_images(
    where: str,
    frame: Any,
    image_shape: tuple[int, int, int],
    image_column: str | Sequence[str],
) -> np.ndarray:
    """Returns images [n, h, w, c] from the columns of a table."""
    num_pixels = int(np.prod(image_shape))
    if not isinstance(image_column, str):
        if len(image_column) != num_pixels:
            raise DataError(f"{where}: {len(image_column)} image columns were given; {num_pixels} are needed")

        columns = [_frame_column(where, frame, column) for column in image_column]
        return np.stack(columns, axis=1).reshape(-1, *image_shape)

    # A cell may hold an array of any shape.
    cells = [np.ravel(cell) for cell in _frame_column(where, frame, image_column)]
    for row, cell in enumerate(cells):
        has_numbers = cell.dtype.kind in "biuf"
        if cell.shape != (num_pixels,) or not has_numbers:
            content = f"{len(cell)} numbers" if has_numbers else f"a {type(cell[0]).__name__}"
            raise DataError(
                f"{where}, row {row}: {image_column} holds {content}; {num_pixels} numbers are "
                "needed (encoded images: write Parquet and choose dataset=parquet)"
            )

    return np.stack(cells).reshape(-1, *image_shape)


def _example_shape(
    frame: Any,
    image_column: str | Sequence[str],
    image_shape: tuple[int, int, int],
) -> tuple[int, ...]:
    """Returns the shape of an example in the table: of a cell's array, or of a row of numbers."""
    num_pixels = int(np.prod(image_shape))
    if isinstance(image_column, str):
        cell_shape = np.shape(frame[image_column].to_numpy()[0])
        if cell_shape and np.prod(cell_shape) == num_pixels:
            return cell_shape

    return (num_pixels,)


def _frame_column(where: str, frame: Any, column: str) -> np.ndarray:
    """Returns a column as an array. Raises DataError if it is missing."""
    # The columns of a pyarrow Table have no names; pandas allows names that are not strings.
    names = [str(name) for name in getattr(frame, "column_names", None) or frame.columns]
    if column not in names:
        raise DataError(f"{where} has no column {column}; it has {', '.join(names)}")
    return frame[column].to_numpy()
