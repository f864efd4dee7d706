"""Ways in which examples of a tiny data set are broken, whatever its kind, for tests of what follows."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf

from hvtrain.data import Source, write_tfrecords
from hvtrain.data.formats.record_files import scan_records
from hvtrain.data.sources.image_folder import ImageFolder
from hvtrain.data.sources.parquet import Parquet
from hvtrain.data.sources.tfrecord import TFRecords
from hvtrain.data.sources.webdataset import web_dataset
from shards import write_shard
from tiny_data import SHAPE, random_images, write_folder

FILE_KINDS = [
    "image_folder",
    "image_folder_cached",
    "parquet",
    "parquet_pixels",
    "tfrecord",
    "webdataset",
]


def broken(kind: str, folder: Path, num_examples: int, bad: set[int], split: str = "train") -> None:
    """Writes examples of random_images, of which those in `bad` cannot be read."""
    images, labels = random_images(num_examples)
    if kind.startswith("image_folder"):
        write_folder(folder / split, images, labels)
        for number in bad:
            image_path(folder, number, split).write_bytes(b"no image")
    elif kind == "webdataset":
        encoded = [
            b"no" if number in bad else tf.io.encode_png(image).numpy()
            for number, image in enumerate(images)
        ]
        for shard, numbers in enumerate(np.array_split(np.arange(num_examples), 2)):
            members = []
            for number in numbers:
                members += [
                    (f"{number}.png", encoded[number]),
                    (f"{number}.cls", str(labels[number]).encode()),
                ]
            write_shard(folder / f"{split}-{shard}.tar", members)
    elif kind == "tfrecord":
        for path in write_tfrecords(folder, split, images, labels, num_files=2):
            file = int(path.name.split("-")[1])
            for number in bad:
                if number % 2 == file:
                    flip(path, scan_records(path)[0][number // 2] + 30)
    else:
        pixels = [image.ravel().tolist() for image in images]
        pixels = [[1] if number in bad else image for number, image in enumerate(pixels)]
        encoded = [
            b"no" if number in bad else tf.io.encode_png(image).numpy()
            for number, image in enumerate(images)
        ]
        column = (
            pa.array(pixels, pa.list_(pa.uint8()))
            if kind == "parquet_pixels"
            else pa.array(encoded)
        )
        pq.write_table(
            pa.table({"image": column, "label": labels}),
            folder / f"{split}.parquet",
            row_group_size=4,
        )


def image_path(folder: Path, number: int, split: str = "train") -> Path:
    return folder / split / f"class_{number % 3}" / f"{number:04d}.png"


def flip(path: Path, at: int) -> None:
    """Turns one bit of the file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def opened(kind: str, folder: Path, on_error: str, **options) -> Source:
    source: Source
    if kind.startswith("image_folder"):
        source = ImageFolder(
            str(folder), SHAPE, cache=kind.endswith("cached"), **{"flip": False, **options}
        )
    elif kind == "webdataset":
        source = web_dataset(str(folder), SHAPE, 3, **options)
    elif kind == "tfrecord":
        source = TFRecords(str(folder), SHAPE, 3, shuffle_buffer=5, **options)
    else:
        source = Parquet(str(folder), SHAPE, 3, **options)
    source.on_error = on_error
    return source


def arrays_of(batches: tf.data.Dataset) -> list[tuple[np.ndarray, np.ndarray]]:
    return list(batches.as_numpy_iterator())


def let_go():
    """Ends the stream that failed last, once its own threads are done.

    The error holds it in a cycle. Collected by a thread of the next stream, it would wait for threads that wait for
    that one.
    """
    time.sleep(0.2)
    gc.collect()
