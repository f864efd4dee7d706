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
FEATURES = (
    "float",
    "float_normalized",
    "float_discretized",
    "integer_categorical",
    "string_categorical",
)
ENCODED_ROWS = 65_536  # Encoded at once, so that the columns of a large table are not in memory twice.

ENCODER_FILE = "features.keras"
TABLE_FILE = "table.json"

Columns = dict[str, np.ndarray]


class Table(MemorySource):
    """The rows of a table: a target column, and features from the others. The inputs are float32 [features].

    The features are fitted to the rows of the training part, the same on every rank, and are part of the
    saved model, which takes the columns by name.

    Args:
        file: a .csv or .parquet file, or one of EMBEDDED.
        target: the column to predict. Names, and whole numbers, are classes; other numbers stay numbers.
        features: columns to use, and how: {age: float_normalized, city: string_categorical}, in the terms
            of FeatureSpace; null: all but the target, numbers normalized and names as categories.
        crosses: pairs of categorical columns whose combinations are features too.
        target_is: "class" or "number"; null: by the column's type.
        num_test, num_validation: rows taken out of the training part at random, with a fixed seed.

    Raises:
        ConfigError: if a setting does not fit the table.
        DataError: once loaded, if the file cannot be read or has gaps.
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
        for name, count in {"num_test": num_test, "num_validation": num_validation}.items():
            if count < 0:
                raise ConfigError(f"dataset.{name}={count} is negative; 0 means none")

        if file in EMBEDDED:
            super().__init__(file, self._load_encoded, "inside scikit-learn")
        else:
            super().__init__(Path(file).stem, self._load_encoded, str(Path(file).absolute()))
        self._file = file
        self._target = target
        self._target_is = target_is
        self._features = features
        self._crosses = [tuple(pair) for pair in crosses]
        self._num_test = num_test
        # Not the num_validation of MemorySource, which would divide the rows after the features are fitted.
        self._num_held_out = num_validation
        self._encoder: keras.Model | None = None
        self._raw: dict[str, Columns] = {}  # Columns by split, as the saved model takes them.

    def _load_encoded(self) -> Elements:
        columns = read_columns(self._file)
        if self._target not in columns:
            raise ConfigError(f"dataset.target={self._target} is no column of {self.name}; it has {', '.join(columns)}")
        targets = self._model_targets(columns.pop(self._target))

        features = self._features or {name: _default_feature(values) for name, values in columns.items()}
        features = dict(sorted(features.items()))  # Keras's models warn of another order of their inputs.
        self._features = features
        self._check_features(features, columns)

        categories = [name for name, feature in features.items() if feature == "string_categorical"]
        columns |= text_columns(self._file, [name for name in categories if columns[name].dtype != object])
        columns = {name: _feature_values(columns[name], feature, name, self.name) for name, feature in features.items()}

        rows_of = self._split(len(targets))
        self._raw = {split: {name: values[rows] for name, values in columns.items()} for split, rows in rows_of.items()}
        if self._encoder is None:
            self._encoder = self._fit_encoder(self._raw["train"])
        return {split: (self._encode(self._raw[split]), targets[rows]) for split, rows in rows_of.items()}

    def _fit_encoder(self, train: Columns) -> keras.Model:
        """Returns a model from columns by name to features, float32 [rows, features]."""
        space = keras.utils.FeatureSpace(self._features, crosses=self._crosses or None, output_mode="concat")
        space.adapt(tf.data.Dataset.from_tensor_slices(train))
        return keras.Model(dict(space.get_inputs()), space.get_encoded_features(), name="features")

    def _encode(self, columns: Columns) -> np.ndarray:
        pieces = []
        for start in range(0, _num_rows(columns), ENCODED_ROWS):
            rows = slice(start, start + ENCODED_ROWS)
            batch = {name: tf.constant(values[rows, None]) for name, values in columns.items()}
            pieces.append(self._encoder(batch).numpy())  # type: ignore[misc]
        return np.concatenate(pieces)

    def fitted(self) -> dict[str, bytes]:
        self.num_examples("train")
        table = {"features": self._features, "classes": self.class_names}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / ENCODER_FILE
            self._encoder.save(path)  # type: ignore[union-attr]
            return {
                ENCODER_FILE: path.read_bytes(),
                TABLE_FILE: json.dumps(table, indent=1).encode(),
            }

    def fit_as(self, files: Mapping[str, bytes]) -> None:
        if ENCODER_FILE not in files:
            return
        table = json.loads(files[TABLE_FILE])
        self._features = table["features"]
        self.class_names = table["classes"]
        self._target_is = "class" if self.class_names else "number"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / ENCODER_FILE
            path.write_bytes(files[ENCODER_FILE])
            self._encoder = keras.models.load_model(path, compile=False)

    def _model_targets(self, values: np.ndarray) -> np.ndarray:
        """Returns the target column as indices of classes, int32, or as numbers, float32."""
        is_class = not np.issubdtype(values.dtype, np.floating)
        if self._target_is:
            is_class = self._target_is == "class"
        if not is_class:
            if values.dtype.kind not in "iufb":
                raise ConfigError(f"dataset.target_is=number and the column {self._target} holds {values[0]!r}")
            return values.astype(np.float32)

        distinct, indices = np.unique(values, return_inverse=True)
        names = [str(value) for value in distinct]
        self.class_names = self.class_names or names
        self.num_classes = len(self.class_names)
        unknown = [name for name in names if name not in self.class_names]
        if unknown:
            raise DataError(
                f"{self.name}: the column {self._target} holds {unknown[0]}, which is none of the run's classes "
                f"({', '.join(self.class_names)}); drop those rows"
            )
        return np.array([self.class_names.index(name) for name in names], np.int32)[indices]

    def _check_features(self, features: Mapping[str, str], columns: Columns) -> None:
        for name, feature in features.items():
            if name not in columns:
                raise ConfigError(f"dataset.features.{name} is no column of {self.name}; it has {', '.join(columns)}")
            if feature not in FEATURES:
                raise ConfigError(f"dataset.features.{name}={feature} is not one of {', '.join(FEATURES)}")
        for name in (name for pair in self._crosses for name in pair):
            if not features.get(name, "").endswith("categorical"):
                raise ConfigError(f"dataset.crosses names {name}, which is no categorical feature; make it one")

    def _split(self, num_rows: int) -> dict[str, np.ndarray]:
        """Returns the row numbers of each split, without empty splits."""
        num_train = num_rows - self._num_test - self._num_held_out
        if num_train < 1:
            raise ConfigError(
                f"dataset.num_test={self._num_test} and num_validation={self._num_held_out} leave nothing of "
                f"{num_rows} rows; take fewer"
            )
        order = np.random.default_rng(SPLIT_SEED).permutation(num_rows)
        train, validation, test = np.split(order, [num_train, num_train + self._num_held_out])
        splits = {"train": train, "validation": validation, "test": test}
        return {split: np.sort(rows) for split, rows in splits.items() if len(rows)}

    def preprocessing(self) -> Preprocessing:
        self.parts()
        spec = {name: tf.TensorSpec((1,), values.dtype, name) for name, values in self._raw["train"].items()}
        return Preprocessing(spec, [self._encoder], "columns of the table, by name")  # type: ignore[list-item]

    def raw_examples(self, split: str, topology: Topology, number: int) -> list[Any]:
        self.parts()
        columns = self._raw[split]
        local = list(topology.share(_num_rows(columns)))[:number]
        return [{name: values[row : row + 1] for name, values in columns.items()} for row in local]


def read_columns(file: str) -> Columns:
    """Reads the columns of a CSV or Parquet file, or of one of EMBEDDED. Raises DataError for gaps."""
    if file in EMBEDDED:
        return _embedded_columns(file)

    path = Path(file)
    if not path.is_file():
        raise DataError(
            f"dataset.file={file} is no file; give a .csv or .parquet file, or one of {', '.join(EMBEDDED)}"
        )
    import pyarrow as pa
    from pyarrow import csv, parquet

    read = parquet.read_table if path.suffix == ".parquet" else csv.read_csv
    try:
        table = read(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read: {str(error).splitlines()[0]}; fix the file") from error
    refuse_gaps(table, table.column_names, file)
    return {name: table[name].to_numpy() for name in table.column_names}


def _embedded_columns(name: str) -> Columns:
    from sklearn import datasets

    options = {}
    if name == "diabetes":
        options["scaled"] = False  # It alone comes standardized, over all its rows.
    table = getattr(datasets, f"load_{name}")(**options)
    columns = dict(zip(table.feature_names, table.data.T.astype(np.float32)))
    return {**columns, "target": table.target}


def text_columns(file: str, names: Sequence[str]) -> Columns:
    """Reads columns of a CSV file as the text that stands there, for categories; empty for other files.

    As numbers or booleans, 00501 would become 501 and true True, and only where all rows of a file are such.
    """
    if not names or Path(file).suffix != ".csv":
        return {}
    from pyarrow import csv

    table = csv.read_csv(file, convert_options=text_options(names))
    return {name: table[name].to_numpy() for name in names}


def text_options(names: Iterable[str]) -> Any:
    """Returns options of pyarrow.csv.read_csv that leave these columns as text."""
    import pyarrow as pa
    from pyarrow import csv

    return csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))


def refuse_gaps(table: Any, names: Iterable[str], where: str) -> None:
    """Raises DataError if a column of a pyarrow.Table has a gap, which NumPy would turn into nan.

    Args:
        table: the table.
        names: of the columns to check.
        where: the file, which begins the message.
    """
    for name in names:
        num_gaps = table[name].null_count
        if num_gaps:
            row = next(row for row, value in enumerate(table[name]) if not value.is_valid)
            raise DataError(f"{where}: row {row} has no {name} (rows without it: {num_gaps}); fill or drop them")


def _default_feature(values: np.ndarray) -> str:
    return "float_normalized" if values.dtype.kind in "iuf" else "string_categorical"


def _feature_values(values: np.ndarray, feature: str, name: str, table: str) -> np.ndarray:
    """Returns a column in the type that its feature takes. Raises DataError for other values."""
    if feature == "string_categorical":
        return values.astype(str)
    if values.dtype.kind not in "iufb":
        raise DataError(
            f"{table}: the column {name} holds {values[0]!r} and is to be {feature}; string_categorical takes names"
        )

    is_finite = np.isfinite(values)
    if not is_finite.all():
        row = int(np.argmin(is_finite))
        raise DataError(f"{table}: row {row} has {values[row]} as {name}; fill such gaps or drop these rows")
    if feature != "integer_categorical":
        return values.astype(np.float32)

    integers = values.astype(np.int64)
    if not np.array_equal(integers, values):
        row = int(np.argmax(integers != values))
        raise DataError(f"{table}: row {row} has {values[row]} as {name}, which is {feature}; choose float_discretized")
    return integers


def _num_rows(columns: Columns) -> int:
    return len(next(iter(columns.values())))
