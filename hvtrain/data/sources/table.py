"""Tables: columns of a CSV or Parquet file, turned into features by keras.utils.FeatureSpace."""

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.source import Preprocessing
from hvtrain.data.sources.memory import SPLIT_SEED, Elements, MemorySource
from hvtrain.errors import ConfigError, DataError

EMBEDDED = ("diabetes", "breast_cancer", "wine", "iris")
"""Tables that are part of scikit-learn."""
FEATURES = ("float", "float_normalized", "float_discretized", "integer_categorical", "string_categorical")
ENCODED_ROWS = 65_536  # At once, so that the columns of a large table are not in memory twice.

ENCODER_FILE, TABLE_FILE = "features.keras", "table.json"

Columns = dict[str, np.ndarray]


class Table(MemorySource):
    """The rows of a table: a target column, and features from the others. The inputs are float32 [features].

    The features are fitted to the rows of the training part, the same on every rank, and are part of the saved model,
    which takes the columns by name.

    Args:
        file: a .csv or .parquet file, or one of EMBEDDED.
        target: the column to predict. Names, and whole numbers, are classes; other numbers stay numbers.
        features: columns to use, and how: {age: float_normalized, city: string_categorical}, as FeatureSpace has it;
            null: all but the target, numbers normalized and names as categories.
        crosses: pairs of categorical columns whose combinations are features too.
        target_is: "class" or "number"; null: by the column's type.
        num_test, num_validation: rows taken out of the training part at random, with a fixed seed.
    """

    def __init__(
        self,
        file: str = "diabetes",
        target: str = "target",
        features: Mapping[str, str] | None = None,
        crosses: Sequence[Sequence[str]] = (),
        target_is: str | None = None,
        num_test: int = 100,
        num_validation: int = 0,
    ) -> None:
        if target_is not in (None, "class", "number"):
            raise ConfigError(f"dataset.target_is={target_is} is not one of class, number, null")
        for key, count in {"num_test": num_test, "num_validation": num_validation}.items():
            if count < 0:
                raise ConfigError(f"dataset.{key}={count} is negative; 0 means none")
        name = file if file in EMBEDDED else Path(file).stem
        origin = "inside scikit-learn" if file in EMBEDDED else str(Path(file).absolute())
        super().__init__(name, self._encoded, origin)
        self._file, self._target, self._target_is = file, target, target_is
        self._features, self._crosses = features, [tuple(pair) for pair in crosses]
        self._num_test, self._taken = num_test, num_validation
        self._encode: keras.Model | None = None
        self._raw: dict[str, Columns] = {}  # The first rows of each split, to check preprocessing().

    def _encoded(self) -> Elements:
        columns = read(self._file)
        if self._target not in columns:
            raise ConfigError(f"dataset.target={self._target} is no column of {self.name}; it has {', '.join(columns)}")
        targets = self._targets(columns.pop(self._target))
        features = self._features or {name: _kind(array) for name, array in columns.items()}
        features = dict(sorted(features.items()))  # Keras's models warn of another order of their inputs.
        self._features = features
        self._check_features(features, columns)
        names = [name for name, kind in features.items() if kind == "string_categorical"]
        columns |= text_columns(self._file, [name for name in names if columns[name].dtype != object])
        columns = {name: _typed(columns[name], kind, name, self.name) for name, kind in features.items()}
        parts = self._split(len(targets))
        if self._encode is None:
            self._encode = self._adapted({name: array[parts["train"]] for name, array in columns.items()})
        self._raw = {split: {name: array[rows] for name, array in columns.items()} for split, rows in parts.items()}
        return {split: (self._rows(self._raw[split]), targets[rows]) for split, rows in parts.items()}

    def _adapted(self, train: Columns) -> keras.Model:
        """From columns by name to features, float32 [rows, features]."""
        space = keras.utils.FeatureSpace(self._features, crosses=self._crosses or None, output_mode="concat")
        space.adapt(tf.data.Dataset.from_tensor_slices(train))
        return keras.Model(dict(space.get_inputs()), space.get_encoded_features(), name="features")

    def fitted(self) -> dict[str, bytes]:
        self.num_examples("train")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / ENCODER_FILE
            self._encode.save(path)  # type: ignore[union-attr]
            found = {"features": self._features, "classes": self.class_names}
            return {ENCODER_FILE: path.read_bytes(), TABLE_FILE: json.dumps(found, indent=1).encode()}

    def fit_as(self, files: Mapping[str, bytes]) -> None:
        if ENCODER_FILE not in files:
            return
        found = json.loads(files[TABLE_FILE])
        self._features, self.class_names = found["features"], found["classes"]
        self._target_is = "class" if self.class_names else "number"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / ENCODER_FILE
            path.write_bytes(files[ENCODER_FILE])
            self._encode = keras.models.load_model(path, compile=False)

    def _targets(self, values: np.ndarray) -> np.ndarray:
        is_class = self._target_is == "class" if self._target_is else not np.issubdtype(values.dtype, np.floating)
        if not is_class:
            if values.dtype.kind not in "iufb":
                raise ConfigError(f"dataset.target_is=number and the column {self._target} holds {values[0]!r}")
            return values.astype(np.float32)
        names, indices = np.unique(values, return_inverse=True)
        found = [str(name) for name in names]
        self.class_names = self.class_names or found
        self.num_classes = len(self.class_names)
        if new := [name for name in found if name not in self.class_names]:
            raise DataError(
                f"{self.name}: the column {self._target} holds {new[0]}, which is none of the run's classes "
                f"({', '.join(self.class_names)}); drop those rows"
            )
        return np.array([self.class_names.index(name) for name in found], np.int32)[indices]

    def _check_features(self, features: Mapping[str, str], columns: Columns) -> None:
        for name, kind in features.items():
            if name not in columns:
                raise ConfigError(f"dataset.features.{name} is no column of {self.name}; it has {', '.join(columns)}")
            if kind not in FEATURES:
                raise ConfigError(f"dataset.features.{name}={kind} is not one of {', '.join(FEATURES)}")
        for name in (name for pair in self._crosses for name in pair):
            if not features.get(name, "").endswith("categorical"):
                raise ConfigError(f"dataset.crosses names {name}, which is no categorical feature; make it one")

    def _split(self, num_rows: int) -> dict[str, np.ndarray]:
        left = num_rows - self._num_test - self._taken
        if left < 1:
            raise ConfigError(
                f"dataset.num_test={self._num_test} and num_validation={self._taken} leave nothing of {num_rows} rows; "
                "take fewer"
            )
        order = np.random.default_rng(SPLIT_SEED).permutation(num_rows)
        cuts = {
            "train": order[:left],
            "validation": order[left : left + self._taken],
            "test": order[left + self._taken :],
        }
        return {split: np.sort(rows) for split, rows in cuts.items() if len(rows)}

    def _rows(self, columns: Columns) -> np.ndarray:
        count = len(next(iter(columns.values())))
        pieces = [
            self._encode({name: tf.constant(array[row : row + ENCODED_ROWS, None]) for name, array in columns.items()})  # type: ignore[misc]
            for row in range(0, count, ENCODED_ROWS)
        ]
        return np.concatenate([piece.numpy() for piece in pieces])

    def preprocessing(self) -> Preprocessing:
        self.parts()
        spec = {name: tf.TensorSpec((1,), array.dtype, name) for name, array in self._raw["train"].items()}
        return Preprocessing(spec, [self._encode], "columns of the table, by name")  # type: ignore[list-item]

    def raw_examples(self, split: str, topology: Topology, number: int) -> list[Any]:
        self.parts()
        columns = self._raw[split]
        rows = list(topology.share(len(next(iter(columns.values())))))[:number]
        return [{name: array[row : row + 1] for name, array in columns.items()} for row in rows]


def read(file: str) -> Columns:
    """The columns of a CSV or Parquet file, or of one of EMBEDDED."""
    if file in EMBEDDED:
        from sklearn import datasets

        options = {"scaled": False} if file == "diabetes" else {}
        found = getattr(datasets, f"load_{file}")(**options)
        return {**dict(zip(found.feature_names, found.data.T.astype(np.float32))), "target": found.target}
    path = Path(file)
    if not path.is_file():
        raise DataError(
            f"dataset.file={file} is no file; give a .csv or .parquet file, or one of {', '.join(EMBEDDED)}"
        )
    import pyarrow as pa
    from pyarrow import csv, parquet

    try:
        table = parquet.read_table(path) if path.suffix == ".parquet" else csv.read_csv(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read: {str(error).splitlines()[0]}; fix the file") from error
    refuse_gaps(table, table.column_names, file)
    return {name: table[name].to_numpy() for name in table.column_names}


def text_columns(file: str, names: Sequence[str]) -> Columns:
    """Columns of a CSV file that are categories as the text that stands there.

    Read as numbers or booleans, 00501 would become 501 and true True, and only where all rows of a file are such.
    """
    if not names or Path(file).suffix != ".csv":
        return {}
    from pyarrow import csv

    table = csv.read_csv(file, convert_options=text_options(names))
    return {name: table[name].to_numpy() for name in names}


def text_options(names: Iterable[str]) -> Any:
    """Options of pyarrow.csv.read_csv that leave these columns as text."""
    import pyarrow as pa
    from pyarrow import csv

    return csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))


def refuse_gaps(table: Any, names: Iterable[str], where: str) -> None:
    """Raises DataError if a column of a pyarrow.Table has a gap, of which NumPy would make nan. where: the file."""
    for name in names:
        if gaps := table[name].null_count:
            row = next(row for row, value in enumerate(table[name]) if not value.is_valid)
            raise DataError(f"{where}: row {row} has no {name} (rows without it: {gaps}); fill or drop them")


def _kind(values: np.ndarray) -> str:
    return "float_normalized" if values.dtype.kind in "iuf" else "string_categorical"


def _typed(values: np.ndarray, kind: str, name: str, table: str) -> np.ndarray:
    """A column in the type that its kind of feature takes."""
    if kind == "string_categorical":
        return values.astype(str)
    if values.dtype.kind not in "iufb":
        raise DataError(
            f"{table}: the column {name} holds {values[0]!r} and is to be {kind}; string_categorical takes names"
        )
    if not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values)))
        raise DataError(f"{table}: row {row} has {values[row]} as {name}; fill such gaps or drop these rows")
    if kind != "integer_categorical":
        return values.astype(np.float32)
    whole = values.astype(np.int64)
    if not np.array_equal(whole, values):
        row = int(np.argmax(whole != values))
        raise DataError(f"{table}: row {row} has {values[row]} as {name}, which is {kind}; choose float_discretized")
    return whole
