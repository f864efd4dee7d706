"""make_source: a tiny set of any kind, written where it is needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from hvtrain.data import Source, from_arrays, write_tfrecords
from hvtrain.data.sources.image_folder import ImageFolder
from hvtrain.data.sources.parquet import Parquet
from hvtrain.data.sources.tfrecord import TFRecords
from tiny_data import SHAPE, random_images, write_folder


@pytest.fixture
def make_source(tmp_path: Path) -> Callable[..., Source]:
    """make_source(kind, num_train, num_test, **options): the same images whatever the kind."""

    def make(kind: str, num_train: int, num_test: int = 0, **options) -> Source:
        train, test = random_images(num_train), random_images(num_test, seed=1)
        if kind == "arrays":
            held_out = test if num_test else (None, None)
            return from_arrays(*train, *held_out, standardize="scale", **options)
        if kind.startswith("image_folder"):
            write_folder(tmp_path / "train", *train)
            if num_test:
                write_folder(tmp_path / "test", *test)
            options = {"flip": False, **options}
            return ImageFolder(str(tmp_path), SHAPE, cache=kind.endswith("cached"), **options)
        if kind == "parquet":
            for split, (images, labels) in (("train", train), ("test", test)):
                table = pa.table(
                    {
                        "image": [tf.io.encode_png(image).numpy() for image in images],
                        "label": labels,
                    }
                )
                pq.write_table(table, tmp_path / f"{split}.parquet", row_group_size=3)
            return Parquet(str(tmp_path), SHAPE, num_classes=3, shuffle_groups=2, **options)
        write_tfrecords(tmp_path, "train", *train, num_files=5)
        if num_test:
            write_tfrecords(tmp_path, "test", *test, num_files=2)
        return TFRecords(str(tmp_path), SHAPE, num_classes=3, shuffle_buffer=7, **options)

    return make
