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
# Rows that are encoded at once, so that the columns of a large table are not in memory twice.
ENCODED_ROWS = 65_536

ENCODER_FILE = "features.keras"
TABLE_FILE = "table.json"

Columns = dict[str, np.ndarray]


class Table(MemorySource):
    """The rows of a table: a target column, and features from the others.

    The inputs are float32 [features]; the targets are int32 classes or float32 numbers.

    The features are fitted to the rows of the training part, the same on every rank, and are part
    of the saved model, which takes the columns by name.

    Example:
        python -m hvtrain dataset=table dataset.file=houses.csv dataset.target=price task=regression
            model=mlp

    Args:
        file: a .csv or .parquet file, or one of EMBEDDED.
        target: the column to predict. Names, and whole numbers, are classes; other numbers stay
            numbers.
        features: columns to use, and how: {age: float_normalized, city: string_categorical}, in
            the terms of FeatureSpace; null: all but the target, numbers normalized and names as
            categories.
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

        for name, count in {
            "num_test": num_test,
            "num_validation": num_validation,
        }.items():
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
        # Not MemorySource's num_validation, which would divide the rows after the features are
        # fitted to them.
        self._num_held_out = num_validation
        self._encoder: keras.Model | None = None
        # Columns by split, as the saved model takes them.
        self._raw: dict[str, Columns] = {}

    def _load_encoded(self) -> Elements:
        """Reads the table, and returns features and targets by split.

        The features are fitted to the training rows, unless fit_as() gave those of an earlier run.
        """
        columns = read_columns(self._file)
        if self._target not in columns:
            raise self._no_column(f"target={self._target}", columns)

        targets = self._model_targets(columns.pop(self._target))

        defaults = {name: _default_feature(values) for name, values in columns.items()}
        # Sorted, since Keras warns if a model gets its inputs in another order.
        features = dict(sorted((self._features or defaults).items()))
        self._features = features
        self._check_features(features, columns)
        columns = self._typed_columns(features, columns)

        # The encoder is fitted to training rows alone, and then used for all splits.
        splits = self._split(len(targets))
        self._raw = {split: _take(columns, rows) for split, rows in splits.items()}
        if self._encoder is None:
            self._encoder = self._fit_encoder(self._raw["train"])

        elements = {}
        for split, rows in splits.items():
            elements[split] = self._encode(self._raw[split]), targets[rows]
        return elements

    def _typed_columns(self, features: Mapping[str, str], columns: Columns) -> Columns:
        """Returns the columns of the features in the types that these take."""
        # Categories that look like numbers or booleans are read again, as text.
        categories = [
            name
            for name, feature in features.items()
            if feature == "string_categorical" and columns[name].dtype != object
        ]
        columns = {**columns, **text_columns(self._file, categories)}

        typed = {}
        for name, feature in features.items():
            typed[name] = _feature_values(columns[name], feature, name, self.name)
        return typed

    def _fit_encoder(self, train: Columns) -> keras.Model:
        """Returns a model from columns by name to features, float32 [rows, features]."""
        space = keras.utils.FeatureSpace(
            self._features,
            crosses=self._crosses or None,
            output_mode="concat",
        )
        space.adapt(tf.data.Dataset.from_tensor_slices(train))
        return keras.Model(
            dict(space.get_inputs()),
            space.get_encoded_features(),
            name="features",
        )

    def _encode(self, columns: Columns) -> np.ndarray:
        """Returns the features of some rows, float32 [rows, features]."""
        pieces = []
        for start in range(0, _num_rows(columns), ENCODED_ROWS):
            rows = _take(columns, slice(start, start + ENCODED_ROWS))
            # A feature is one value of an example: [rows, 1].
            batch = {name: tf.constant(values[:, None]) for name, values in rows.items()}
            pieces.append(self._encoder(batch).numpy())  # type: ignore[misc]

        return np.concatenate(pieces)

    def fitted(self) -> dict[str, bytes]:
        self.num_examples("train")  # The features are fitted when the table is loaded.
        table = {"features": self._features, "classes": self.class_names}

        # Keras saves a model to a path, not to bytes.
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
        # The file may have other columns than when the run began, and so other default features.
        self._features = table["features"]
        self.class_names = table["classes"]
        self._target_is = "class" if self.class_names else "number"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / ENCODER_FILE
            path.write_bytes(files[ENCODER_FILE])
            self._encoder = keras.models.load_model(path, compile=False)

    def _model_targets(self, values: np.ndarray) -> np.ndarray:
        """Returns the target column as indices of classes, int32, or as numbers, float32."""
        # Fractions are numbers; names and whole numbers are classes.
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
        # Classes that the model knows keep their numbers; it has no output for others.
        unknown = [name for name in names if name not in self.class_names]
        if unknown:
            raise DataError(
                f"{self.name}: the column {self._target} holds {unknown[0]}, which is none of "
                f"the run's classes ({', '.join(self.class_names)}); drop those rows"
            )

        return np.array([self.class_names.index(name) for name in names], np.int32)[indices]

    def _check_features(self, features: Mapping[str, str], columns: Columns) -> None:
        """Raises ConfigError for unknown columns and kinds of features."""
        for name, feature in features.items():
            if name not in columns:
                raise self._no_column(f"features.{name}", columns)
            if feature not in FEATURES:
                raise ConfigError(f"dataset.features.{name}={feature} is not one of {', '.join(FEATURES)}")

        for name in (name for pair in self._crosses for name in pair):
            if not features.get(name, "").endswith("categorical"):
                raise ConfigError(f"dataset.crosses names {name}, which is no categorical feature; make it one")

    def _no_column(self, setting: str, columns: Columns) -> ConfigError:
        return ConfigError(f"dataset.{setting} is no column of {self.name}; it has {', '.join(columns)}")

    def _split(self, num_rows: int) -> dict[str, np.ndarray]:
        """Returns the row numbers of each split, without empty splits."""
        num_train = num_rows - self._num_test - self._num_held_out
        if num_train < 1:
            raise ConfigError(
                f"dataset.num_test={self._num_test} and num_validation={self._num_held_out} "
                f"leave nothing of {num_rows} rows; take fewer"
            )

        order = np.random.default_rng(SPLIT_SEED).permutation(num_rows)
        # Rows are sorted below, so that each split keeps the order of the table.
        train, validation, test = np.split(order, [num_train, num_train + self._num_held_out])
        splits = {"train": train, "validation": validation, "test": test}
        return {split: np.sort(rows) for split, rows in splits.items() if len(rows)}

    def preprocessing(self) -> Preprocessing:
        self.parts()
        spec = {}
        for name, values in self._raw["train"].items():
            spec[name] = tf.TensorSpec((1,), values.dtype, name)

        layers: Any = [self._encoder]
        return Preprocessing(spec, layers, "columns of the table, by name")

    def raw_examples(self, split: str, topology: Topology, number: int) -> list[Any]:
        self.parts()
        columns = self._raw[split]
        # The first rows of the shard, since evaluation() gives these first.
        local = list(topology.share(_num_rows(columns)))[:number]
        return [_take(columns, slice(row, row + 1)) for row in local]


def read_columns(file: str) -> Columns:
    """Reads the columns of a CSV or Parquet file, or of one of EMBEDDED.

    Raises:
        DataError: if the file cannot be read, or has gaps.
    """
    if file in EMBEDDED:
        return _embedded_columns(file)

    path = Path(file)
    if not path.is_file():
        raise DataError(
            f"dataset.file={file} is no file; give a .csv or .parquet file, or one of {', '.join(EMBEDDED)}"
        )

    # Imported here: the tables inside scikit-learn do without it.
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
    """Reads a table that is part of scikit-learn."""
    from sklearn import datasets

    options = {}
    if name == "diabetes":
        options["scaled"] = False  # It alone comes standardized, over all its rows.
    table = getattr(datasets, f"load_{name}")(**options)
    columns = dict(zip(table.feature_names, table.data.T.astype(np.float32)))
    return {**columns, "target": table.target}


def text_columns(file: str, names: Sequence[str]) -> Columns:
    """Reads columns of a CSV file as the text that stands there; empty for other files.

    As numbers or booleans, 00501 would become 501 and true True, and only where all rows of a file
    are such.
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

    # refuse_gaps() has refused empty cells; a file may also hold nan as a number.
    is_finite = np.isfinite(values)
    if not is_finite.all():
        row = int(np.argmin(is_finite))
        raise DataError(f"{table}: row {row} has {values[row]} as {name}; fill such gaps or drop these rows")

    if feature != "integer_categorical":
        return values.astype(np.float32)

    # Categories are looked up by number, so 1.5 would become 1.
    integers = values.astype(np.int64)
    if not np.array_equal(integers, values):
        row = int(np.argmax(integers != values))
        raise DataError(f"{table}: row {row} has {values[row]} as {name}, which is {feature}; choose float_discretized")

    return integers


def _take(columns: Columns, rows: Any) -> Columns:
    """Returns some rows, by number or as a slice."""
    return {name: values[rows] for name, values in columns.items()}


def _num_rows(columns: Columns) -> int:
    return len(next(iter(columns.values())))
