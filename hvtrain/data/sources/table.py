"""Tables in CSV and Parquet files: columns become features, in the same way for the training table and later ones."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf
from tensorflow import TensorSpec, nest

from hvtrain.core.topology import Topology
from hvtrain.data.description import listed
from hvtrain.data.formats.columns import Cells, Column, with_progress
from hvtrain.data.formats.schema import (
    Schema,
    Settings,
    infer_schema,
    plain_columns,
    read_cells,
    unknown_shares,
)
from hvtrain.data.formats.table_phrases import describe, describe_target, odd_texts
from hvtrain.data.formats.tables import partitions_in, read_table
from hvtrain.data.pipeline.features import TableFeatures, fill_gaps, fit, gap_error
from hvtrain.data.source import Parts, Phrases, Preprocessing
from hvtrain.data.sources.memory import (
    Elements,
    MemorySource,
    Part,
    check_counts,
    check_files,
    names_as_text,
    random_parts,
    spec_of,
)
from hvtrain.errors import ConfigError, DataError, UserError
from hvtrain.system.files import is_remote

log = logging.getLogger(__name__)

# Tables that are part of scikit-learn.
SKLEARN_TABLES = ("diabetes", "breast_cancer", "wine", "iris")
TABLE_FILE = "table.json"
# The report shows at most this many columns of an example.
MAX_CELLS = 20
# Tables of up to this many training rows are read again for cells(): 0.8 s for 20
# columns (2 busy cores, 2026-11-26).
MAX_READ_AGAIN = 100_000
# A warning names each column with at least this share of categories that training did not have.
MANY_UNKNOWN = 0.1


class NewRows(NamedTuple):
    """Rows of another table, as the run's model takes them."""

    num_rows: int
    raw: Callable[[np.ndarray], dict[str, np.ndarray]]
    """Returns the rows with these indices, by the names of the model's inputs."""
    ids: Mapping[str, np.ndarray]
    """The column dataset.id, by its name; empty if the run or the table has none."""
    unknown: Mapping[str, float]
    """The share of rows whose category did not occur in training, by column, without shares of 0."""


class Table(MemorySource):
    """A source of the rows of a table: a target column, and features from the others.

    The inputs are float32 [features], or, with category_ids, a dict; the targets are int32 classes or float32 numbers.

    The kind and the statistics of each column are determined once, from the training table, and are equal
    on every rank. They are kept in the saved model, which takes columns by name, and in the run folder.

    Example:
        python -m hvtrain dataset=table dataset.file=houses.csv dataset.target=price task=regression
            model=mlp

    Args:
        file: A CSV or Parquet file, a folder or a list of such files, or one of SKLEARN_TABLES.
        target: The column to predict.
        num_test, num_validation: Number of rows held out of the training table at random, with a fixed seed.
        test_file, validation_file: Tables to use instead of such rows.
        delimiter, encoding: Format of CSV files; null: detected.
        columns: Settings for columns; see Settings.

    Raises:
        ConfigError: If a setting does not fit the table.
        DataError: Once loaded, if the file cannot be read or has gaps that nothing fills.
    """

    target_setting = "dataset.target_is"

    def __init__(
        self,
        file: str | Sequence[str] = "diabetes",
        target: str | int = "target",
        num_test: int = 100,
        num_validation: int = 0,
        test_file: str | None = None,
        validation_file: str | None = None,
        delimiter: str | None = None,
        encoding: str | None = None,
        **columns: Any,
    ) -> None:
        # Not MemorySource's num_validation, which takes rows out after features are fitted to them.
        self._num_held_out = {"validation": num_validation, "test": num_test}
        check_counts(num_validation=num_validation, num_test=num_test)
        check_files(file=file, test_file=test_file, validation_file=validation_file)
        if delimiter is not None and len(delimiter) != 1:
            raise ConfigError(
                f"dataset.delimiter={delimiter!r} is not one character; give one, or null"
            )

        files = nest.flatten(file)
        origin = ", ".join(
            str(name if is_remote(name) else Path(name).absolute()) for name in files
        )
        if file in SKLEARN_TABLES:
            origin = "inside scikit-learn"
        super().__init__(Path(files[0]).stem, self._load_encoded, origin)

        self._files = {"train": file, "validation": validation_file, "test": test_file}
        self._text_format = {"delimiter": delimiter, "encoding": encoding}
        for setting in ("features", "missing", "drop", "id"):
            if setting in columns:
                columns[setting] = names_as_text(columns[setting])
        # A single name may be given without a list, as in dataset.drop=size.
        columns["drop"] = nest.flatten(columns.get("drop") or [])
        self._settings = Settings(str(target), **columns)
        self._known_features: TableFeatures | None = None
        # By split, for raw_examples() and cells(): all columns, and the indices of the split's rows.
        self._loaded: dict[str, tuple[dict[str, Any], np.ndarray]] = {}
        self._ids: dict[str, dict[str, np.ndarray]] = {}
        self._description: dict[str, list[str]] = {}

    @property
    def _features(self) -> TableFeatures:
        """The features, fitted to the training table or by an earlier run, whose data may be gone."""
        if self._known_features is None:
            self.num_examples("train")
        return self._known_features  # type: ignore[return-value]

    @property
    def element_spec(self) -> Parts:
        inputs = spec_of(self._features.model.output)
        return inputs, TensorSpec((), tf.int32 if self.class_names else tf.float32)

    def _load_encoded(self) -> Elements:
        """Reads the tables, and returns features and targets by split.

        The features are fitted to the training rows, unless fit_as() set those of an earlier run.
        """
        tables = {split: self._read(file, split) for split, file in self._files.items() if file}
        elements: dict[str, Parts] = {}
        for split, table in tables.items():
            elements |= self._encode(split, table)
        return elements

    def _encode(self, split: str, table: pa.Table) -> dict[str, Parts]:
        """Encodes a split's table; the training table also holds the splits that have no table."""
        location = str(self._files[split])
        arrays = plain_columns(table)
        is_fitted = self._known_features is not None
        schema = (
            self._features.schema
            if is_fitted
            else infer_schema(arrays, self._settings, self.name, partitions_in(table))
        )
        if self._settings.id not in (None, *table.column_names):
            raise DataError(f"{location} lacks the column {self._settings.id} (dataset.id); add it")
        columns = [*schema.columns, schema.target]
        cells = read_cells(columns, arrays, location)
        targets, is_used = self._targets(schema, cells[schema.target.name], location)
        for column in schema.columns:
            if column.missing == "drop":
                is_used &= ~cells[column.name].is_gap
        rows = np.flatnonzero(is_used)

        parts = self._split(rows) if split == "train" else {split: rows}
        if not is_fitted:
            progress = with_progress(schema.columns, f"{location}: statistics of columns")
            fitted = [fit(column, cells[column.name], parts["train"]) for column in progress]
            schema = replace(schema, columns=fitted)
            self._set_schema(schema)
        values = {
            column.name: fill_gaps(column, cells[column.name], location, rows)
            for column in schema.columns
        }
        warnings = _column_warnings(columns, cells, unknown_shares(schema.columns, values))
        num_dropped = table.num_rows - len(rows)
        if num_dropped:
            warnings.append(f"rows left out because of gaps: {num_dropped:,}")
        if split == "train":
            self._description = {
                "features": describe(schema, cells),
                "target": [describe_target(schema, targets[parts["train"]])],
                "warnings": warnings,
            }
        else:
            self._description["warnings"] += [f"{split}: {text}" for text in warnings]

        elements = {}
        ids = self._ids_in(table)
        for part, indices in parts.items():
            elements[part] = self._features.encode(values, indices, location), targets[indices]
            self._loaded[part] = values, indices
            self._ids[part] = {name: column[indices] for name, column in ids.items()}
        return elements

    def _read(self, file: Any, split: str) -> pa.Table:
        if file in SKLEARN_TABLES:
            return _sklearn_table(file)
        setting = "dataset.file" if split == "train" else f"dataset.{split}_file"
        table = read_table(file, setting, **self._text_format)
        if not table.num_rows:
            raise DataError(f"{setting}={file} holds no rows; give a table with rows")
        return table

    def _targets(
        self, schema: Schema, cells: Cells, location: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the targets, as int32 class indices or float32 numbers, and a mask of the rows that have one."""
        column = schema.target
        has_target = ~cells.is_gap
        if column.missing == "refuse" and not has_target.all():
            raise gap_error(column, cells, location)
        if not schema.classes:
            return cells.values[:, 0].astype(np.float32), has_target

        # Known classes keep their indices; the model has no output for others.
        indices = pc.index_in(cells.values, pa.array(schema.classes, pa.string()))
        unknown = pc.unique(cells.values.filter(indices.is_null())).drop_null().to_pylist()
        if unknown:
            raise DataError(
                f"{location}: the column {column.name} holds {unknown[0]}, which is not one of "
                f"the run's classes ({', '.join(schema.classes)}); drop those rows"
            )
        return pc.fill_null(indices, 0).to_numpy().astype(np.int32), has_target

    def _split(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Divides the training table's rows among the splits; returns their indices, without empty splits."""
        counts = dict(self._num_held_out)
        # A split with a file of its own takes no rows of the training table.
        counts |= {split: 0 for split in counts if self._files[split]}
        num_train = len(rows) - sum(counts.values())
        if num_train < 1:
            raise ConfigError(
                f"dataset.num_test={counts['test']} and num_validation={counts['validation']} "
                f"leave none of the {len(rows)} rows for training; hold out fewer"
            )

        sizes = {"train": num_train, **counts}
        parts = zip(sizes, random_parts(*sizes.values()))
        return {split: rows[indices] for split, indices in parts if len(indices)}

    def _set_schema(self, schema: Schema) -> None:
        self._known_features = TableFeatures(schema)
        if schema.has_ids:
            self.more_facts = {"category_sizes": self._known_features.category_sizes}
        if schema.classes:
            self.class_names = list(schema.classes)
            self.num_classes = len(schema.classes)

    def description(self) -> Phrases:
        return super().description() | self._description

    def fitted(self) -> dict[str, bytes]:
        return {TABLE_FILE: self._features.schema.to_json()}

    def fit_as(self, files: Mapping[str, bytes]) -> None:
        # The file may have other columns than when the run began, or columns of another type.
        if TABLE_FILE in files:
            self._set_schema(Schema.from_json(files[TABLE_FILE]))

    def whole_targets(self) -> dict[str, Any]:
        try:
            return super().whole_targets()
        except UserError:
            # A finished run can predict other tables even if its own is gone. Where examples are
            # needed, reading them raises the error.
            if self._known_features is None:
                raise
            return {}

    def assets(self) -> dict[str, bytes]:
        # If columns share one input, users need the schema to know their positions in it.
        return self.fitted() if self._features.has_shared_input else {}

    def fit(self, train: Part) -> None:
        # Features are fitted on loading. Frees memory for the shards, which are cut next.
        self._loaded = {}

    def preprocessing(self) -> Preprocessing:
        return Preprocessing(
            self._features.spec(), [self._features.model], "columns of the table, by name"
        )

    def raw_examples(self, split: str, topology: Topology, count: int) -> list[Any]:
        if split not in self._loaded:
            self.parts()
        values, rows = self._loaded[split]
        # evaluation() begins with these rows of the shard.
        first = rows[self.shard_rows(split, topology)[:count]]
        raw = self._features.raw(values, first)
        return [{name: array[row] for name, array in raw.items()} for row in range(len(first))]

    def cells(self, split: str, indices: Sequence[int]) -> dict[str, list[Any]]:
        # Once the shards are cut, the whole table has to be read again, while other ranks wait.
        if self.num_examples("train") > MAX_READ_AGAIN:
            return {}
        if split not in self._loaded:
            self.parts()
        values, rows = self._loaded[split]
        chosen = rows[np.asarray(indices, np.int64)]
        # Counted from 0 over all files, as in messages. Line numbers would also count blank lines.
        files = nest.flatten(self._files.get(split) or self._files["train"])
        names = listed([Path(file).name for file in files], most=2)
        cells = {f"row of {names}": chosen.tolist()}
        for name, column in self._features.raw(values, chosen).items():
            # A vector would not fit on the page.
            if column.shape[1] == 1 and len(cells) <= MAX_CELLS:
                cells[name] = list(map(str, column[:, 0]))
        return cells

    def ids(self, split: str, topology: Topology) -> dict[str, np.ndarray]:
        """Returns the column dataset.id for this rank's rows of a split; empty without that setting."""
        rows = self.shard_rows(split, topology)
        return {name: ids[rows] for name, ids in self._ids[split].items()}

    def _ids_in(self, table: pa.Table) -> dict[str, np.ndarray]:
        name = self._settings.id
        if name is None or name not in table.column_names:
            return {}
        column = table[name]
        # NumPy's integers cannot represent gaps, floats would round large ids, and Arrow gives a gap
        # among categories the last category.
        if column.null_count and not pa.types.is_temporal(column.type):
            return {name: np.array(column.to_pylist(), object)}
        return {name: column.to_numpy()}

    def new_rows(self, file: Path) -> NewRows:
        """Reads a table to be predicted, in the same way as the training table.

        Raises:
            DataError: A column is missing, is of another kind, or has gaps that nothing fills.
        """
        features = self._features
        schema = features.schema
        table = read_table(file, "input", **self._text_format)
        location = f"input={file}"
        cells = read_cells(schema.columns, plain_columns(table), location)
        values = {
            column.name: fill_gaps(column, cells[column.name], location)
            for column in schema.columns
        }
        unknown = unknown_shares(schema.columns, values)
        for text in _column_warnings(schema.columns, cells, unknown):
            log.warning("%s: %s", location, text)
        raw = partial(features.raw, values)
        return NewRows(table.num_rows, raw, self._ids_in(table), unknown)


def _column_warnings(
    columns: Sequence[Column], cells: Mapping[str, Cells], unknown: Mapping[str, float]
) -> list[str]:
    """Returns a warning for each column with cells that are not of its kind, or with many new categories.

    Args:
        columns: Columns of the schema.
        cells: Their cells, by name.
        unknown: Shares of new categories, from unknown_shares().
    """
    odd = [
        f"{column.name} is a column of {column.kind}s, but holds {odd_texts(cells[column.name])}; "
        "such cells count as gaps"
        for column in columns
        if cells[column.name].odd
    ]
    new = [
        f"{share:.0%} of the rows have a value of {name} that training did not have; the model has learned nothing "
        "about it"
        for name, share in unknown.items()
        if share >= MANY_UNKNOWN
    ]
    return odd + new


def _sklearn_table(name: str) -> pa.Table:
    """Reads a table that is part of scikit-learn."""
    from sklearn import datasets

    # scikit-learn standardizes only this table by default, over all its rows.
    options = {"scaled": False} if name == "diabetes" else {}
    bunch = getattr(datasets, f"load_{name}")(**options)
    columns = dict(zip(map(str, bunch.feature_names), bunch.data.T.astype(np.float32)))
    return pa.table(columns | {"target": bunch.target})
