"""Arrays as people have them: sparse, of objects, one-hot, of names. Taken where their meaning is clear."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvtrain.data.description import listed
from hvtrain.errors import DataError

TAKEN_KINDS = "biufUS"
"""NumPy's kinds of numbers, booleans and text."""


def plain_array(values: Any, where: str) -> np.ndarray:
    """Returns an array of numbers or text.

    Args:
        values: An array, a data frame, a sparse matrix, or a list.
        where: Begins messages.

    Raises:
        DataError: It holds something else.
    """
    # NumPy would make a single object of a sparse matrix.
    if hasattr(values, "toarray"):
        values = values.toarray()
    try:
        array = np.asarray(values)
        if array.dtype.kind == "O":
            array = _typed(array, where)
    except ValueError as error:
        raise DataError(f"{where} has rows of unlike lengths ({error}); pad them to one length") from error

    if array.dtype.kind in "mM":
        raise DataError(
            f"{where} holds dates or times ({array.dtype}); give numbers, such as days: (x - x.min()) / "
            "numpy.timedelta64(1, 'D')"
        )
    if array.dtype.kind not in TAKEN_KINDS:
        raise DataError(f"{where} holds {array.dtype}; numbers or text are needed")
    return array


def _typed(array: np.ndarray, where: str) -> np.ndarray:
    """Returns an array of objects in the type that all its values have.

    Raises:
        DataError: They have several types, or no value.
    """
    values = array.ravel().tolist()
    kinds = {np.asarray(value).dtype.kind for value in values}
    if kinds <= {*"biuf"} or kinds in ({"U"}, {"S"}):
        return np.array(array.tolist())
    if kinds in ({"M"}, {"m"}):
        return array.astype(f"{kinds.pop()}8[us]")

    row = next((row for row, value in enumerate(array) if any(item is None for item in np.ravel(value))), None)
    if row is not None:
        raise DataError(f"{where} has no value in row {row}; fill the gap or drop the row")
    types = sorted({type(value).__name__ for value in values})
    raise DataError(
        f"{where} holds values of several types ({listed(types)}); give numbers alone, or a dict of columns such as "
        "{name: frame[name].to_numpy() for name in frame}, or write the table and choose dataset=table"
    )


def class_targets(targets: np.ndarray, num_classes: int) -> np.ndarray:
    """Returns targets that are clearly classes as whole numbers [n]; other targets as they are.

    They are one-hot rows of num_classes, whole numbers as floats, or booleans.

    >>> class_targets(np.eye(3)[[2, 0]], 3), class_targets(np.array([1.0, 0.0]), 2)
    (array([2, 0]), array([1, 0]))
    """
    if targets.dtype.kind not in "biuf":
        return targets
    if targets.ndim == 2 and targets.shape[1] == num_classes > 1:
        is_one_hot = ((targets == 0) | (targets == 1)).all() and (targets.sum(axis=1) == 1).all()
        return targets.argmax(axis=1) if is_one_hot else targets
    is_column = targets.shape[1:] in ((), (1,))
    if is_column and targets.dtype.kind in "bf" and (targets == np.floor(targets)).all():
        return targets.astype(np.int64)
    return targets


def names_of(targets: np.ndarray) -> list[str]:
    """The distinct names in targets of text, sorted."""
    return [_text(name) for name in np.unique(targets)]


def numbered(targets: np.ndarray, names: Sequence[str], where: str) -> np.ndarray:
    """Returns the indices of targets of text among the names of classes.

    Raises:
        DataError: One is none of them.
    """
    distinct, inverse = np.unique(targets, return_inverse=True)
    unknown = [_text(name) for name in distinct if _text(name) not in names]
    if unknown:
        raise DataError(
            f"{where} holds {listed(unknown)}, none of the classes ({listed(names)}); drop those examples, or add the "
            "names to class_names"
        )
    indices = np.array([list(names).index(_text(name)) for name in distinct], np.int64)
    return indices[inverse].reshape(targets.shape)


def _text(name: Any) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)
