"""Tables: columns of CSV and Parquet files as features, in the same way for every file that comes later."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.formats.columns import Cells
from hvtrain.data.formats.schema import (
    Schema,
    Settings,
    infer_schema,
    plain_columns,
    read_cells,
    unknown_share,
)
from hvtrain.data.formats.table_phrases import describe, describe_target
from hvtrain.data.formats.tables import TextFormat, read_table
from hvtrain.data.pipeline.features import TableFeatures, filled, fit, refused_gaps
from hvtrain.data.source import Preprocessing
from hvtrain.data.sources.memory import SPLIT_SEED, Elements, MemorySource, Part
from hvtrain.errors import ConfigError, DataError

log = logging.getLogger(__name__)

EMBEDDED = ("diabetes", "breast_cancer", "wine", "iris")
"""Tables that are part of scikit-learn."""
TABLE_FILE = "table.json"
SECONDS_BETWEEN = 5.0


@dataclass(frozen=True)
class NewRows:
    """Rows of another table, as the run's model takes them."""

    num_rows: int
    raw: Callable[[np.ndarray], dict[str, np.ndarray]]
    """Returns the rows of these numbers by the names of the model's inputs."""
    ids: Mapping[str, np.ndarray]
    """The column dataset.id, if the run has one."""
    unknown: Mapping[str, float]
    """Columns of names, with the share of rows whose name training did not have."""


class Table(MemorySource):
    """The rows of a table: a target column, and features from the others.

    The inputs are float32 [features]; the targets are int32 classes or float32 numbers.

    What each column is, and its statistics, are found once, on the training rows, the same on every
    rank. They are part of the saved model, which takes the columns by name, and of the run folder.

    Example:
        python -m hvtrain dataset=table dataset.file=houses.csv dataset.target=price task=regression
            model=mlp

    Args:
        file: a CSV or Parquet file, a folder of them, or a list; or one of EMBEDDED.
        target: the column to predict. Names, and whole numbers, are classes; other numbers stay
            numbers.
        features: columns to use, and how: {age: float_normalized, city: string_categorical}, in
            the terms of FeatureSpace; null: all but the target, numbers normalized and names as
            categories.
        crosses: pairs of categorical columns whose combinations are features too.
        target_is: "class" or "number"; null: by the column's type.
        num_test, num_validation: rows taken out of the training part at random, with a fixed seed.
        test_file, validation_file: instead of rows taken out.
        missing: one of MISSING for all gaps, or by column: {age: median, city: indicator}. All but
            "refuse" leave out rows without a target.
        drop: columns to leave out.
        id: a column that is no feature, and stands beside each prediction.
        dates: one of DATES: days since 1970-01-01; year, month, day, weekday and hour; or left out.
        delimiter, decimal, thousands, encoding: of CSV files; null: as the file shows them.

    Raises:
        ConfigError: if a setting does not fit the table.
        DataError: once loaded, if the file cannot be read or has gaps that nothing fills.
    """

    def __init__(
        self,
        file: str | Sequence[str] = "diabetes",
        target: str = "target",
        features: Mapping[str, str] | None = None,
        crosses: Sequence[Sequence[str]] = (),
        target_is: str | None = None,
        num_test: int = 100,
        num_validation: int = 0,
        test_file: str | None = None,
        validation_file: str | None = None,
        missing: str | Mapping[str, str] = "refuse",
        drop: Sequence[str] = (),
        id: str | None = None,
        dates: str = "number",
        delimiter: str | None = None,
        decimal: str | None = None,
        thousands: str | None = None,
        encoding: str | None = None,
    ) -> None:
        for name, count in {
            "num_test": num_test,
            "num_validation": num_validation,
        }.items():
            if count < 0:
                raise ConfigError(f"dataset.{name}={count} is negative; 0 means none")

        if delimiter is not None and len(delimiter) != 1:
            raise ConfigError(f"dataset.delimiter={delimiter!r} is not one character; give one, or null")

        files = [file] if isinstance(file, str) else list(file)
        origin = ", ".join(str(Path(name).absolute()) for name in files)
        if file in EMBEDDED:
            origin = "inside scikit-learn"
        super().__init__(Path(files[0]).stem, self._load_encoded, origin)

        self._files: dict[str, Any] = {"train": file, "validation": validation_file, "test": test_file}
        # Not MemorySource's num_validation, which would divide the rows after the features are
        # fitted to them.
        self._num_held_out = {"validation": num_validation, "test": num_test}
        self._text_format = TextFormat(delimiter, encoding)
        self._settings = Settings(
            target,
            target_is,
            features,
            [tuple(pair) for pair in crosses],
            missing,
            list(drop),
            id,
            dates,
            decimal,
            thousands,
        )
        self._schema: Schema | None = None
        self._features: TableFeatures | None = None
        # By split, what raw_examples() needs: all columns, and the split's rows in them.
        self._loaded: dict[str, tuple[dict[str, Any], np.ndarray]] = {}
        self._ids: dict[str, np.ndarray] = {}
        self._description: dict[str, list[str]] = {}

    @property
    def element_spec(self) -> tuple[Any, ...]:
        # A finished run's is known, also where its data are gone.
        if self._features is None:
            self.num_examples("train")
        return (
            tf.TensorSpec((self._features.size,), tf.float32),  # type: ignore[union-attr]
            tf.TensorSpec((), tf.int32 if self.class_names else tf.float32),
        )

    def _load_encoded(self) -> Elements:
        """Reads the table, and returns features and targets by split.

        The features are fitted to the training rows, unless fit_as() gave those of an earlier run.
        """
        elements = {}
        for split, file in self._files.items():
            if not file:
                continue
            where = str(file)
            table = self._read(file, split)
            arrays = plain_columns(table)
            if self._schema is None:
                schema = infer_schema(arrays, self._settings, self.name)
            else:
                schema = self._schema
            cells = read_cells(schema.columns, arrays, where)
            targets, is_used = self._targets(schema, arrays, where)
            for column in schema.columns:
                if column.missing == "drop":
                    is_used &= ~cells[column.name].is_gap
            rows = np.flatnonzero(is_used)

            parts = {split: rows}
            if split == "train":
                parts = self._split(rows)
                if self._schema is None:
                    schema = self._fit(schema, cells, parts["train"])
                self._describe(schema, cells, targets[parts["train"]], table.num_rows - len(rows))
            values = {column.name: filled(column, cells[column.name], where, rows) for column in schema.columns}
            for part, numbers in parts.items():
                progress = _Progress(f"{self.name}, {part}: features of", len(schema.columns))
                encoded = self._features.encode(values, numbers, progress.update)  # type: ignore[union-attr]
                elements[part] = encoded, targets[numbers]
                self._loaded[part] = values, numbers
                if schema.id is not None:
                    self._ids[part] = _ids(table, schema.id)[numbers]
        return elements

    def _read(self, file: Any, split: str) -> pa.Table:
        if file in EMBEDDED:
            return _embedded_table(file)
        setting = "dataset.file" if split == "train" else f"dataset.{split}_file"
        table = read_table(file, setting, self._text_format)
        if not table.num_rows:
            raise DataError(f"{setting}={file} holds no rows; give a table that has some")
        return table

    def _targets(self, schema: Schema, arrays: Mapping[str, pa.Array], where: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the targets as indices of classes, int32, or as numbers, float32; and where there are any."""
        column = schema.target
        cells = read_cells([column], arrays, where)[column.name]
        has_target = ~cells.is_gap
        if column.missing == "refuse" and not has_target.all():
            raise refused_gaps(column, cells, where)
        if not schema.classes:
            return cells.values[:, 0].astype(np.float32), has_target

        # Classes that the model knows keep their numbers; it has no output for others.
        indices = pc.index_in(cells.values, pa.array(schema.classes, pa.string()))
        unknown = pc.unique(cells.values.filter(indices.is_null())).drop_null().to_pylist()
        if unknown:
            raise DataError(
                f"{self.name}: the column {column.name} holds {unknown[0]}, which is none of "
                f"the run's classes ({', '.join(schema.classes)}); drop those rows"
            )
        return pc.fill_null(indices, 0).to_numpy().astype(np.int32), has_target

    def _split(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the row numbers of each split, without empty splits."""
        counts = dict(self._num_held_out)
        # A split with a file of its own takes no rows of the training table.
        counts |= {split: 0 for split in counts if self._files[split]}
        num_train = len(rows) - sum(counts.values())
        if num_train < 1:
            raise ConfigError(
                f"dataset.num_test={counts['test']} and num_validation={counts['validation']} "
                f"leave nothing of {len(rows)} rows; take fewer"
            )

        order = np.random.default_rng(SPLIT_SEED).permutation(len(rows))
        # Rows are sorted below, so that each split keeps the order of the table.
        train, validation, test = np.split(order, [num_train, num_train + counts["validation"]])
        splits = {"train": train, "validation": validation, "test": test}
        return {split: rows[np.sort(numbers)] for split, numbers in splits.items() if len(numbers)}

    def _fit(self, schema: Schema, cells: Mapping[str, Cells], rows: np.ndarray) -> Schema:
        """Returns the schema with statistics of the training rows."""
        progress = _Progress(f"{self.name}: statistics of", len(schema.columns))
        columns = []
        for column in schema.columns:
            columns.append(fit(column, cells[column.name], rows))
            progress.update(len(columns))
        schema = replace(schema, columns=columns)
        self._take_schema(schema)
        return schema

    def _take_schema(self, schema: Schema) -> None:
        self._schema = schema
        self._features = TableFeatures(schema.columns, [tuple(pair) for pair in schema.crosses])
        if schema.classes:
            self.class_names = list(schema.classes)
            self.num_classes = len(schema.classes)

    def _describe(
        self,
        schema: Schema,
        cells: Mapping[str, Cells],
        targets: np.ndarray,
        num_dropped: int,
    ) -> None:
        warnings = []
        for column in schema.columns:
            odd = cells[column.name].odd
            if len(odd):
                texts = ", ".join(map(repr, odd[:3]))
                warnings.append(f"{column.name} holds {texts}, which is no {column.kind} and counts as a gap")
        if num_dropped:
            warnings.append(f"rows left out because of gaps: {num_dropped:,}")
        self._description = {
            "features": describe(schema, cells),
            "target": [describe_target(schema, targets)],
        }
        if warnings:
            self._description["warnings"] = warnings

    def description(self) -> dict[str, list[str]]:
        return {**super().description(), **self._description}

    def fitted(self) -> dict[str, bytes]:
        if self._schema is None:
            self.num_examples("train")  # The features are fitted when the table is loaded.
        return {TABLE_FILE: self._schema.to_json()}  # type: ignore[union-attr]

    def fit_as(self, files: Mapping[str, bytes]) -> None:
        # The file may have other columns than when the run began, or columns of another type.
        if TABLE_FILE in files:
            self._take_schema(Schema.from_json(files[TABLE_FILE]))

    def whole_targets(self) -> dict[str, Any]:
        try:
            return super().whole_targets()
        except DataError:
            # A finished run predicts other tables also where its own is gone. Who reads examples
            # gets the error then.
            if self._schema is None:
                raise
            return {}

    def assets(self) -> dict[str, bytes]:
        if self._features is None or not self._features.has_block:
            return {}
        # Only the schema says which columns stand where in a single input.
        return self.fitted()

    def fit(self, train: Part) -> None:
        # Shards are cut next, and then need the memory.
        self._loaded = {}

    def preprocessing(self) -> Preprocessing:
        if self._features is None:
            self.num_examples("train")
        layers: Any = [self._features.model()]  # type: ignore[union-attr]
        return Preprocessing(self._features.spec(), layers, "columns of the table, by name")  # type: ignore[union-attr]

    def raw_examples(self, split: str, topology: Topology, number: int) -> list[Any]:
        if split not in self._loaded:
            self.parts()
        values, rows = self._loaded[split]
        # The first rows of the shard, since evaluation() gives these first.
        local = np.asarray(topology.share(len(rows))[:number], np.int64)
        raw = self._features.raw(values, rows[local])  # type: ignore[union-attr]
        return [{name: array[row] for name, array in raw.items()} for row in range(len(local))]

    def ids(self, split: str, topology: Topology) -> dict[str, np.ndarray]:
        """The column dataset.id of this rank's rows of a split; empty if there is none."""
        name = self._settings.id
        if name is None or not self.num_examples(split):
            return {}
        rows = np.asarray(topology.share(self.num_examples(split)), np.int64)
        return {name: self._ids[split][rows]}

    def new_rows(self, file: str | Path, setting: str) -> NewRows:
        """Reads another table as the training table was read.

        Args:
            file: as dataset.file.
            setting: which names it, for messages.

        Raises:
            DataError: It lacks a column, or one that is of another type, or has gaps that nothing fills.
        """
        if self._schema is None:
            self.num_examples("train")
        schema: Schema = self._schema  # type: ignore[assignment]
        table = read_table(file, setting, self._text_format)
        where = f"{setting}={file}"
        cells = read_cells(schema.columns, plain_columns(table), where)
        values = {}
        unknown = {}
        for column in schema.columns:
            values[column.name] = filled(column, cells[column.name], where)
            share = unknown_share(column, values[column.name])
            if share:
                unknown[column.name] = share
        ids = {}
        if schema.id is not None and schema.id in table.column_names:
            ids[schema.id] = _ids(table, schema.id)
        features: TableFeatures = self._features  # type: ignore[assignment]
        return NewRows(table.num_rows, lambda rows: features.raw(values, rows), ids, unknown)


def _ids(table: pa.Table, name: str) -> np.ndarray:
    return table[name].to_numpy()


def _embedded_table(name: str) -> pa.Table:
    """Reads a table that is part of scikit-learn."""
    from sklearn import datasets

    options = {}
    if name == "diabetes":
        options["scaled"] = False  # It alone comes standardized, over all its rows.
    bunch = getattr(datasets, f"load_{name}")(**options)
    columns = dict(zip(map(str, bunch.feature_names), bunch.data.T.astype(np.float32)))
    return pa.table({**columns, "target": bunch.target})


class _Progress:
    """Logs how much of some work is done, every few seconds; nothing for short work."""

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._logged_at = time.monotonic()

    def update(self, num_done: int) -> None:
        now = time.monotonic()
        if now - self._logged_at >= SECONDS_BETWEEN:
            self._logged_at = now
            log.info("%s %s of %s columns", self._label, f"{num_done:,}", f"{self._total:,}")
