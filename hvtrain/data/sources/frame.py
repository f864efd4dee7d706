"""Data sets from tables in memory: pandas or Polars DataFrames, or pyarrow Tables."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvtrain.data.pipeline.transform import check_image_shape
from hvtrain.data.sources.arrays import from_arrays
from hvtrain.data.sources.memory import MemorySource
from hvtrain.errors import DataError


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
    """A source from tables whose columns have to_numpy(); `options` are those of from_arrays.

    image_column: a column of lists (or arrays) of height * width * channels numbers, or the names of as many
    columns of one number each, as in pixel0 ... pixel783. label_column: whole numbers.
    Raises DataError if a column is missing or holds something else.
    """
    shape = check_image_shape(image_shape)
    parts = [
        _arrays(f"{name}, {split}", frame, shape, image_column, label_column) if frame is not None else (None, None)
        for split, frame in (("train", train), ("test", test), ("validation", validation))
    ]
    options.setdefault("example_shape", _example_shape(train, image_column, shape))
    return from_arrays(*parts[0], *parts[1], *parts[2], name=name, images=True, **options)


def _arrays(
    where: str, frame: Any, image_shape: tuple[int, int, int], image_column: str | Sequence[str], label_column: str
) -> tuple[np.ndarray, np.ndarray]:
    num_pixels = int(np.prod(image_shape))
    if isinstance(image_column, str):
        cells = [np.ravel(cell) for cell in _column(where, frame, image_column)]
        for row, cell in enumerate(cells):
            if cell.shape != (num_pixels,) or cell.dtype.kind not in "biuf":
                came = f"{len(cell)} numbers" if cell.dtype.kind in "biuf" else f"a {type(cell[0]).__name__}"
                fix = f"{num_pixels} numbers are needed (encoded images: write Parquet and choose dataset=parquet)"
                raise DataError(f"{where}, row {row}: {image_column} holds {came}; {fix}")
        images = np.stack(cells)
    else:
        if len(image_column) != num_pixels:
            raise DataError(f"{where}: {len(image_column)} image columns were given; {num_pixels} are needed")
        images = np.stack([_column(where, frame, one) for one in image_column], axis=1)
    return images.reshape(-1, *image_shape), _column(where, frame, label_column)


def _example_shape(frame: Any, image_column: str | Sequence[str], image_shape: tuple[int, int, int]) -> tuple[int, ...]:
    """Shape of an example in the table: an array of any shape in a cell, or a row of numbers."""
    num_pixels = int(np.prod(image_shape))
    cell = np.shape(frame[image_column].to_numpy()[0]) if isinstance(image_column, str) else ()
    return cell if np.prod(cell) == num_pixels and cell else (num_pixels,)


def _column(where: str, frame: Any, column: str) -> np.ndarray:
    names = [str(known) for known in (frame.column_names if hasattr(frame, "column_names") else frame.columns)]
    if column not in names:
        raise DataError(f"{where} has no column {column}; it has {', '.join(names)}")
    return frame[column].to_numpy()
