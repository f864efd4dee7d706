"""Writes predictions as they arrive: a CSV or Parquet file that appears when it is complete, or images of masks."""

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image

from hvtrain.core.records import TEMPORARY, remove
from hvtrain.errors import ConfigError, StorageError
from hvtrain.finished.outputs import Rows

ROW_GROUP_BYTES = 2**24
"""Of a Parquet file. A group for each batch would make the file many times larger."""


class Writer(ABC):
    """Writes to a path; only the chief calls it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def add(self, rows: Rows) -> None:
        """Writes some more rows. Raises StorageError."""

    @abstractmethod
    def close(self) -> None:
        """Completes the output. Raises StorageError."""

    def discard(self) -> None:
        """Removes an unfinished output."""
        remove(self.path.with_name(f"{TEMPORARY}{self.path.name}"))


@contextmanager
def _stored(path: Path) -> Iterator[None]:
    """Turns an error of the disk into a StorageError with that path."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} was not written: {error.strerror or error}; make room there") from error


class TableWriter(Writer):
    """A .csv or .parquet file, which has its name only once it is complete."""

    def __init__(self, path: Path) -> None:
        path = path.resolve()  # A link stays one.
        super().__init__(path)
        self._temporary = path.with_name(f"{TEMPORARY}{path.name}")
        self._file: Any = None
        self._waiting: list[pa.Table] = []  # Of the next row group of a Parquet file.
        self._waiting_bytes = 0

    def add(self, rows: Rows) -> None:
        with _stored(self.path):
            if self.path.suffix == ".parquet":
                table = pa.table(rows)
                self._waiting.append(table)
                self._waiting_bytes += table.nbytes
                if self._waiting_bytes >= ROW_GROUP_BYTES:
                    self._write_row_group()
                return
            if self._file is None:
                self._file = self._temporary.open("w", newline="", encoding="utf-8")
                csv.writer(self._file).writerow(rows)
            csv.writer(self._file).writerows(zip(*(array.tolist() for array in rows.values())))

    def _write_row_group(self) -> None:
        table = pa.concat_tables(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        self._file = self._file or pa.parquet.ParquetWriter(self._temporary, table.schema)
        self._file.write_table(table)

    def close(self) -> None:
        with _stored(self.path):
            if self._waiting:
                self._write_row_group()
            if self._file is not None:
                self._file.close()
                self._temporary.replace(self.path)


class MaskWriter(Writer):
    """A folder of PNG images whose values are classes, named after the image or the number of the example.

    The mask of x.jpg is x.png, or x.jpg.png if the mask of another image is x.png already.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._written: set[Path] = set()

    def add(self, rows: Rows) -> None:
        files = rows.get("file", [f"{number:08d}" for number in rows["example"]])
        for name, mask in zip(files, rows["mask"]):
            path = (self.path / str(name)).with_suffix(".png")
            if path in self._written:
                path = self.path / f"{name}.png"
            self._written.add(path)
            with _stored(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(mask.astype(np.uint8 if mask.max() < 256 else np.uint16)).save(path)

    def close(self) -> None:
        pass  # Each image is complete.


def writer_for(output: Path, has_masks: bool, inputs: Iterable[Path] = ()) -> Writer:
    """The writer for that path.

    inputs: files and folders that are read, or were trained on. Raises ConfigError if the output would replace them, if
    its suffix is unknown or its folder does not exist, and for a folder of masks that holds anything.
    """
    if any(path.exists() and output.exists() and path.samefile(output) for path in inputs):
        raise ConfigError(f"--output {output} is what is read too; choose another name")
    if has_masks:
        if output.suffix or output.is_file():
            raise ConfigError(f"--output {output} is a file; predictions of masks are images, so give a folder")
        if output.is_dir() and any(output.iterdir()):
            raise ConfigError(f"--output {output} is not empty; choose another folder")
        return MaskWriter(output)
    if output.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"--output {output} is of no known kind; give FILE.csv or FILE.parquet")
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; choose the name of a file")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: {output.absolute().parent} is not a folder; make it, or choose another")
    return TableWriter(output)
