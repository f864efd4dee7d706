"""Writes predictions batch by batch, as a table or as masks.

A table is a CSV or Parquet file that appears once it is complete; masks are PNG files.
"""

import csv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image

from hvtrain.errors import ConfigError, StorageError
from hvtrain.finished.outputs import Rows
from hvtrain.system.files import TEMPORARY, page_path, remove

# Size of a Parquet row group in memory. A row group for each batch would make the file many times
# larger.
ROW_GROUP_BYTES = 2**24


class Writer:
    """Writes rows to a path (chief only).

    A table's file gets its name only when it is complete. Table writers open `self._file` on the
    first `add`, since they need the rows' columns.
    """

    _file: Any = None

    def __init__(self, path: Path) -> None:
        self.path = path
        # In the same folder, since a rename works only within one file system.
        self._temporary = path.with_name(f"{TEMPORARY}{path.name}")

    def add(self, rows: Rows) -> None:
        """Writes rows. Raises StorageError."""
        raise NotImplementedError

    def close(self) -> None:
        """Completes a table's file; masks are complete after each `add`. Raises StorageError."""
        if self._file is not None:
            with _storage_errors(self.path):
                self._file.close()
                self._temporary.replace(self.path)

    def discard(self) -> None:
        """Removes an unfinished output."""
        remove(self._temporary)


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    """Turns an OSError into a StorageError that names the path."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} was not written: {error.strerror or error}; make room there"
        ) from error


class CsvWriter(Writer):
    """Writes a .csv file."""

    def add(self, rows: Rows) -> None:
        with _storage_errors(self.path):
            if self._file is None:
                self._file = self._temporary.open("w", newline="", encoding="utf-8")
                csv.writer(self._file).writerow(rows)
            # tolist() would turn times in nanoseconds into integers.
            columns = [
                (array.astype("M8[us]") if array.dtype == "M8[ns]" else array).tolist()
                for array in rows.values()
            ]
            csv.writer(self._file).writerows(zip(*columns))


class ParquetWriter(Writer):
    """Writes a .parquet file, gathering many batches into each row group."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._group: list[pa.Table] = []

    def add(self, rows: Rows) -> None:
        self._group.append(pa.table(rows))
        if sum(table.nbytes for table in self._group) >= ROW_GROUP_BYTES:
            self._write_group()

    def close(self) -> None:
        if self._group:
            self._write_group()
        super().close()

    def _write_group(self) -> None:
        # In some batches a column of ids may have only missing values, which pyarrow gives the
        # type null.
        table = pa.concat_tables(self._group, promote_options="permissive")
        self._group = []
        with _storage_errors(self.path):
            if self._file is None:
                # If all values in the first group are missing, the column becomes text.
                fields = [
                    column.with_type(pa.string()) if pa.types.is_null(column.type) else column
                    for column in table.schema
                ]
                self._file = pa.parquet.ParquetWriter(self._temporary, pa.schema(fields))
            self._file.write_table(table.cast(self._file.schema))


class MaskWriter(Writer):
    """Writes a folder of PNG masks whose pixel values are classes.

    A mask is named after its input image, or else after the example's number. The mask of x.jpg is
    x.png, or x.jpg.png if another image's mask is x.png already.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # Files that this process wrote; the folder was empty before.
        self._written: set[Path] = set()

    def add(self, rows: Rows) -> None:
        names = rows.get("file", [f"{number:08d}" for number in rows["example"]])
        for name, mask in zip(names, rows["mask"]):
            path = (self.path / str(name)).with_suffix(".png")
            if path in self._written:
                path = self.path / f"{name}.png"
            self._written.add(path)
            with _storage_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                # A pixel of an 8-bit PNG can have at most 256 values.
                dtype = np.uint8 if mask.max() < 256 else np.uint16
                Image.fromarray(mask.astype(dtype)).save(path)


def writer_for(output: Path, has_masks: bool, inputs: Any = ()) -> Writer:
    """Returns the writer that fits an output path and the kind of predictions.

    Args:
        output: a .csv or .parquet file, or a folder for masks.
        has_masks: True if the predictions are masks.
        inputs: nested settings, some of which name input files, which must not be overwritten.
            Which ones do depends on the data set, so every string is tried as a path.

    Raises:
        ConfigError: the output would replace an input, its suffix is unknown, its folder does not
            exist, or a folder for masks is not empty.
    """
    for value in keras.tree.flatten(inputs):
        is_input = False
        # samefile follows links. It raises an error unless both are paths that exist.
        with suppress(OSError, TypeError, ValueError):
            is_input = output.samefile(value)
        if is_input:
            raise ConfigError(f"--output {output} is also an input; choose another name")
    if has_masks:
        if output.suffix or output.is_file():
            raise ConfigError(
                f"--output {output} is a file; predictions of masks are images, so give a folder"
            )
        if output.is_dir() and any(output.iterdir()):
            raise ConfigError(f"--output {output} is not empty; choose another folder")
        return MaskWriter(output)

    if output.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"--output {output} is of no known kind; give FILE.csv or FILE.parquet")
    # If the path is a symbolic link, its target is replaced, and the link is kept.
    path = page_path(output).resolve()
    return ParquetWriter(path) if output.suffix == ".parquet" else CsvWriter(path)
