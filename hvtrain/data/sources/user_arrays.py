"""Data sets from a user's memory: from_arrays for arrays, from_frame for data frames.

Arrays may also be sparse matrices, arrays of objects, one-hot rows or class names, as long as their
meaning is clear.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvtrain.data.description import listed
from hvtrain.data.pipeline.transform import check_image_shape
from hvtrain.data.source import ImageShape, Parts
from hvtrain.data.sources.arrays import (
    ArraySource,
    ImagesWithMasks,
    check_image_cell,
    class_indices,
)
from hvtrain.data.sources.memory import MemorySource
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
    """Makes a source from arrays in memory: inputs x, targets y and, optionally, weights w of the examples.

    x, y and w may be arrays [n, ...] or nested structures of them, such as a dict by the names of
    the model's inputs. The caller's arrays stay in memory beside the shard; for many images, give
    ArraySource a function that loads them.

    Example:
        source = from_arrays(x_train, y_train, x_test, y_test, num_validation=5000)

    Args:
        images: True if x are images [n, h, w] or [n, h, w, c], to be normalized and augmented. The default is True
            if x is an array of such a shape, and either x holds bytes or y holds class indices or masks.
        num_classes: Number of classes, if each target is one whole number; by default, that of class_names or the
            largest number in y_train plus 1. If it is given, one-hot rows, whole floats and booleans are
            classes too, and whole numbers [n, h, w] are masks of classes (255: ignored), which
            augmentation moves with their images.
        class_names: The name of each class. Text targets become indices into these names, which by
            default are the sorted texts in y_train.
        num_validation: Number of examples taken out of the training part at random, with a fixed seed.
        facts: More facts for the model's builder and the task, such as vocabulary_size.
        options: Those of ArraySource, for images.

    Raises:
        DataError: If arrays do not belong together, or hold neither numbers nor text.
        ConfigError: If options for images are given, but x are not images.
    """
    arrays = _arrays_by_split(
        name,
        {
            "train": (x_train, y_train, w_train),
            "validation": (x_validation, y_validation, w_validation),
            "test": (x_test, y_test, w_test),
        },
    )

    if class_names is not None:
        # The truth value of an array, such as LabelEncoder.classes_, is ambiguous; that of a list is not.
        class_names = list(class_names)
    # The training part decides what the arrays mean.
    y = arrays["train"][1]
    if isinstance(y, np.ndarray) and _is_column(y):
        if y.dtype.kind in "US":
            class_names = class_names or [_text(label) for label in np.unique(y)]
        elif y.dtype == bool:
            num_classes = num_classes or 2
        if class_names and y.dtype.kind in "USiu":
            num_classes = num_classes or len(class_names)

    def convert_targets(convert, *settings):
        for split, (inputs, targets, *weights) in arrays.items():
            converted = convert(targets, *settings, f"{name}, y_{split}")
            arrays[split] = inputs, converted, *weights

    if num_classes is not None:
        convert_targets(_class_targets, num_classes, class_names)

    x, y = arrays["train"][:2]
    has_integers = isinstance(y, np.ndarray) and y.dtype.kind in "iu"
    has_labels = has_integers and _is_column(y)
    has_masks = has_integers and y.ndim == 3 and num_classes is not None and images is not False
    has_image_shape = isinstance(x, np.ndarray) and x.ndim in (3, 4)
    if images is None:
        images = has_image_shape and (x.dtype == np.uint8 or has_labels or has_masks)
    if has_labels:
        convert_targets(class_indices)
        # Counted in the training part only: the model predicts no class that it has never seen.
        num_classes = _count_classes(arrays["train"][1], num_classes, f"{name}, y_train")

    if images:
        if not has_image_shape:
            shown = f"shape {x.shape[1:]}" if isinstance(x, np.ndarray) else "several arrays"
            raise DataError(
                f"{name}: x_train holds examples with {shown}; images [h, w] or [h, w, c] are needed"
            )
        # Images without a channel axis have one channel.
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
        raise ConfigError(
            f"{name}: options for images ({', '.join(options)}) were given, but x_train holds none; leave them out"
        )
    more_facts = {"num_classes": num_classes, "class_names": class_names, **(facts or {})}
    return MemorySource(name, lambda: arrays, num_validation=num_validation, more_facts=more_facts)


def _arrays_by_split(name: str, splits: Mapping[str, tuple[Any, Any, Any]]) -> dict[str, Parts]:
    """Returns the splits that were given, each as arrays (x, y) or (x, y, w)."""
    # All splits need the structure of train, which is the source's element_spec.
    has_weights = splits["train"][2] is not None
    arrays = {}
    for split, (x, y, w) in splits.items():
        if (x is None) != (y is None):
            raise DataError(f"{name}: x_{split} and y_{split} belong together; give or omit both")
        if x is None:
            continue
        if (w is not None) != has_weights:
            raise DataError(f"{name}: w_{split} and w_train belong together; give or omit both")
        # Arrays keep no column names, and pandas.get_dummies may give each split different columns.
        needed, columns = (list(_columns(frame)) for frame in (splits["train"][0], x))
        unnamed = list(map(str, range(len(columns))))
        if needed and columns and needed != columns and unnamed not in (needed, columns):
            raise DataError(
                f"{name}: x_{split} has the columns {listed(columns)}, and x_train {listed(needed)}; give both the "
                "same columns in the same order"
            )

        # To tf.nest, a sparse matrix or a data frame is one value; _plain_array() converts it.
        arrays[split] = tuple(
            tf.nest.map_structure(
                partial(_plain_array, location=f"{name}, {letter}_{split}"), _pack_rows(part, train)
            )
            for letter, part, train in zip("xyw", (x, y, w), splits["train"])
            if part is not None
        )

    return arrays


def _pack_rows(part: Any, train: Any) -> Any:
    """Turns a list of rows into an array; `train`, the training split's list, tells rows from a structure."""
    if isinstance(part, dict):
        known = train if isinstance(train, dict) else {}
        return {name: _pack_rows(item, known.get(name, item)) for name, item in part.items()}
    if not isinstance(part, list):
        return part
    # A list with an array that is at least as long as the list is a structure. It becomes a tuple,
    # since tf.data would stack the arrays of a list.
    rows = train if isinstance(train, list) else part
    lengths = [len(item) for item in rows if len(getattr(item, "shape", ()))]
    if len(rows) <= max(lengths, default=0):
        return tuple(part)
    return np.fromiter(part, object)


def _plain_array(values: Any, location: str) -> np.ndarray:
    """Converts values to an array of numbers or text.

    Args:
        values: An array, a data frame, a sparse matrix, or a number.
        location: Name of the values, such as "arrays, x_train", with which messages begin.

    Raises:
        DataError: The values are of another kind, or have no rows.
    """
    if np.ma.is_masked(values):
        raise DataError(
            f"{location} has {np.ma.count_masked(values):,} masked value(s); fill them "
            "(values.filled(...)), or drop the rows"
        )
    # NumPy would make a sparse matrix a single object.
    if hasattr(values, "toarray"):
        values = values.toarray()
    try:
        array = np.asarray(values)
        if not array.ndim or not len(array):
            raise DataError(
                f"{location} ({type(values).__name__}) has no rows; each example needs one"
            )
        if array.dtype.kind == "O":
            array = _convert_objects(array, location)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{location} has rows of different lengths; pad them") from error

    # Only booleans, numbers and text are accepted.
    if array.dtype.kind not in "biufUS":
        raise DataError(
            f"{location} holds {array.dtype}; numbers or text are needed (for dates, give numbers such "
            "as days: (x - x.min()) / numpy.timedelta64(1, 'D'))"
        )
    return array.astype(np.float64) if array.dtype == np.longdouble else array


def _convert_objects(array: np.ndarray, location: str) -> np.ndarray:
    """Converts an array of objects to the type that its values share.

    Raises:
        DataError: The values are neither all numbers nor all text, or one is missing.
    """
    values = array.ravel().tolist()
    kinds = {np.asarray(value).dtype.kind for value in values}
    if kinds <= {*"biuf"} or kinds in ({"U"}, {"S"}):
        return np.array(array.tolist())

    for row, value in enumerate(array):
        if {*map(str, np.ravel(np.asarray(value, object)))} & {"None", "nan", "<NA>", "NaT"}:
            raise DataError(f"{location} has no value in row {row}; fill the gap or drop the row")
    types = sorted({type(value).__name__ for value in values})
    raise DataError(
        f"{location} holds values of the type(s) {listed(types)}; give numbers alone, or a dict of columns such as "
        "{name: frame[name].to_numpy() for name in frame}, or write the table and choose dataset=table"
    )


def _class_targets(
    targets: Any, num_classes: int, class_names: Sequence[str] | None, location: str
) -> Any:
    """Converts targets that are clearly classes, or masks of them, to whole numbers; returns others unchanged.

    Classes are one-hot rows of num_classes, whole numbers as floats, booleans, or class_names.

    >>> labels = np.eye(3)[[2, 0]], np.array([1.0, 0.0]), np.array(["b", "a"])
    >>> [_class_targets(array, 3, ["a", "b"], "y").tolist() for array in labels]
    [[2, 0], [1, 0], [1, 0]]
    """
    if not isinstance(targets, np.ndarray):
        return targets
    if targets.dtype.kind in "US":
        return _name_indices(targets, class_names, location) if class_names else targets

    if targets.ndim == 2 and targets.shape[1] == num_classes > 1:
        is_one_hot = ((targets == 0) | (targets == 1)).all() and (targets.sum(axis=1) == 1).all()
        return targets.argmax(axis=1) if is_one_hot else targets
    if targets.dtype.kind in "bf" and _is_column(targets):
        if (targets == np.floor(targets)).all():
            return targets.astype(np.int64)
        # class_indices() raises the error that says what class labels have to be.
        return class_indices(targets, location) if targets.ndim == 1 else targets

    # Masks may have an axis for their one channel, as images do.
    if targets.ndim == 4 and targets.shape[3] == 1:
        targets = targets[..., 0]
    if targets.ndim == 3 and targets.dtype.kind == "b":
        targets = targets.astype(np.uint8)
    return targets


def _is_column(array: np.ndarray) -> bool:
    """True for one value per example: shape [n] or [n, 1]."""
    return array.shape[1:] in ((), (1,))


def _count_classes(labels: np.ndarray, num_classes: int | None, location: str) -> int:
    """Returns num_classes or, by default, the largest label + 1.

    Raises:
        DataError: Labels seem to begin above 0: none is 0, and num_classes is too small for the largest one or, if
            it is not given, the labels have no gaps. The model's output for 0 would never be trained.
    """
    low, high = int(labels.min()), int(labels.max())
    is_shifted = len(np.unique(labels)) == high - low + 1
    if num_classes is not None:
        is_shifted = high >= num_classes
    if low > 0 and is_shifted:
        raise DataError(
            f"{location} holds the labels {low} to {high}, and classes are numbered from 0; give y - {low}, "
            f"num_classes={high + 1} if there are examples of 0 elsewhere, or floats if numbers are predicted"
        )
    return num_classes or high + 1


def _name_indices(targets: np.ndarray, names: Sequence[str], location: str) -> np.ndarray:
    """Converts text targets to indices of class names.

    Raises:
        DataError: A target is not one of the names.
    """
    distinct, inverse = np.unique(targets, return_inverse=True)
    texts = list(map(_text, distinct))
    unknown = [text for text in texts if text not in names]
    if unknown:
        raise DataError(
            f"{location} holds {listed(unknown)}, not among the classes ({listed(names)}); drop those examples, or "
            "add the names to class_names"
        )
    indices = np.array(list(map(names.index, texts)), np.int64)
    return indices[inverse].reshape(targets.shape)


def _text(name: Any) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def from_frame(
    train: Any,
    test: Any = None,
    validation: Any = None,
    *,
    image_shape: Sequence[int],
    image_column: str | int | Sequence[str | int] = "image",
    label_column: str | int = "label",
    name: str = "frame",
    **options,
) -> MemorySource:
    """Makes a source of images from pandas or Polars DataFrames, or pyarrow Tables.

    Example:
        pixels = [f"pixel{number}" for number in range(784)]
        source = from_frame(train, test, image_shape=[28, 28, 1], image_column=pixels)

    Args:
        train, test, validation: Tables whose columns have to_numpy().
        image_shape: [height, width, channels].
        image_column: A column of lists (or arrays) of height * width * channels numbers, or the
            names of that many columns of one number each, as in pixel0 ... pixel783.
        label_column: A column of whole numbers.
        options: Those of from_arrays.

    Raises:
        DataError: If a column is missing or holds something else.
    """
    shape = check_image_shape(image_shape)
    arrays: dict[str, Any] = {}
    for split, frame in {"train": train, "test": test, "validation": validation}.items():
        if frame is not None:
            location = f"{name}, {split}"
            if not len(frame):
                raise DataError(f"{location} has no rows; give some (only train is required)")
            cells = _frame_cells(location, frame, shape, image_column)
            options.setdefault("example_shape", cells[0].shape)
            arrays[f"x_{split}"] = np.stack([cell.reshape(shape) for cell in cells])
            arrays[f"y_{split}"] = _frame_column(location, frame, label_column)

    return from_arrays(**arrays, name=name, images=True, **options)


def _frame_cells(
    location: str, frame: Any, shape: ImageShape, image_column: str | int | Sequence[str | int]
) -> list[np.ndarray]:
    """Returns the pixels of each row of a table, in the shape that they have in the table."""
    if isinstance(image_column, str | int):
        rows = _frame_column(location, frame, image_column)
    else:
        rows = np.stack([_frame_column(location, frame, column) for column in image_column], axis=1)
    # A cell may hold an array of any shape.
    cells = list(map(np.atleast_1d, rows))
    for row, cell in enumerate(cells):
        check_image_cell(cell, shape, f"{location}, row {row}")
    return cells


def _frame_column(location: str, frame: Any, column: str | int) -> np.ndarray:
    """Returns a column as an array. Raises DataError if it is missing."""
    names = _columns(frame)
    if str(column) not in names:
        raise DataError(f"{location} has no column {column}; it has {', '.join(names)}")
    return frame[names[str(column)]].to_numpy()


def _columns(frame: Any) -> dict[str, Any]:
    """Returns a table's column names, which in pandas need not be text, by their text; empty for other objects."""
    names = getattr(frame, "column_names", getattr(frame, "columns", ()))
    return {str(name): name for name in names}
