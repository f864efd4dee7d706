"""Input pipelines for one model: hvtrain's, Keras's, and those that its users write by hand. Compared by
`benchmarks input`.

All give shuffled batches of float32 pixels, 0 ... 1, and labels, endlessly, on the same number of
threads.
"""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from benchmarks.clock import Stopwatch
from benchmarks.input import BATCH_SIZE, NUM_CLASSES, TRAINED
from hvtrain.core.topology import Topology
from hvtrain.data.source import Source, StreamRequest
from hvtrain.data.sources.image_folder import ImageFolder
from hvtrain.data.sources.parquet import Parquet
from hvtrain.data.sources.tfrecord import TFRecords

SHUFFLED = 1000  # Examples in the buffers of the pipelines by hand.
AUTO = tf.data.AUTOTUNE


def hvtrain_source(folder: Path, file_format: str, num_images: int) -> tf.data.Dataset:
    """The source as the runner uses it, with its defaults but no augmentation."""
    source: Source
    if file_format == "image_folder":
        source = ImageFolder(str(folder), TRAINED, flip=False)
    else:
        source = {"tfrecord": TFRecords, "parquet": Parquet}[file_format](str(folder), TRAINED, NUM_CLASSES)
    return source.training(StreamRequest(Topology(), BATCH_SIZE, 1, 0, num_images // BATCH_SIZE))


def keras_folder(folder: Path, file_format: str, num_images: int) -> tf.data.Dataset:
    """Keras's own, with its defaults; its users add Rescaling. Resizes by itself, not antialiased."""
    batches = keras.utils.image_dataset_from_directory(
        folder / "train", image_size=TRAINED[:2], batch_size=BATCH_SIZE, verbose=False
    )
    rescale = keras.layers.Rescaling(1 / 255)
    scaled = batches.map(lambda images, labels: (rescale(images), labels), num_parallel_calls=AUTO)
    return scaled.repeat().prefetch(AUTO)


def by_hand(folder: Path, file_format: str, num_images: int, antialias: bool = False) -> tf.data.Dataset:
    """As the guides of TensorFlow write it: encoded images are shuffled, then decoded one by one, in parallel."""
    # Whoever writes it by hand knows the size of the files.
    fits = folder.parent.name == f"{TRAINED[0]}x{TRAINED[1]}"

    def pixels(encoded: tf.Tensor) -> tf.Tensor:
        image = tf.io.decode_jpeg(encoded, channels=TRAINED[2])
        # Files of the right size need no resizing, and a pipeline by hand has none.
        if not fits:
            image = tf.image.resize(image, TRAINED[:2], antialias=antialias)
        return tf.ensure_shape(tf.cast(image, tf.float32) / 255.0, TRAINED)

    readers = {"image_folder": _files, "tfrecord": _records, "parquet": _rows}
    examples = readers[file_format](folder)
    decoded = examples.map(lambda encoded, label: (pixels(encoded), label), num_parallel_calls=AUTO)
    return decoded.batch(BATCH_SIZE, drop_remainder=True).prefetch(AUTO)


def _files(folder: Path) -> tf.data.Dataset:
    paths = sorted(folder.glob("train/*/*.jpg"))
    labels = [int(path.parent.name.removeprefix("class_")) for path in paths]
    files = tf.data.Dataset.from_tensor_slices((list(map(str, paths)), labels)).shuffle(len(paths)).repeat()
    return files.map(lambda path, label: (tf.io.read_file(path), label), num_parallel_calls=AUTO)


def _records(folder: Path) -> tf.data.Dataset:
    features = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }

    def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        example = tf.io.parse_single_example(record, features)
        return example["image"], example["label"]

    files = sorted(map(str, folder.glob("train*.tfrecord")))
    records = tf.data.TFRecordDataset(files, num_parallel_reads=AUTO).shuffle(SHUFFLED).repeat()
    return records.map(parse, num_parallel_calls=AUTO)


def _rows(folder: Path) -> tf.data.Dataset:
    import pyarrow.parquet as pq

    def batches() -> Iterator[tuple[Any, Any]]:
        with pq.ParquetFile(folder / "train.parquet") as file:
            for batch in file.iter_batches(BATCH_SIZE, columns=["image", "label"]):
                yield batch["image"].to_numpy(zero_copy_only=False), batch["label"].to_numpy()

    spec = tf.TensorSpec([None], tf.string), tf.TensorSpec([None], tf.int64)
    return tf.data.Dataset.from_generator(batches, output_signature=spec).unbatch().shuffle(SHUFFLED).repeat()


PIPELINES: dict[str, Callable[[Path, str, int], tf.data.Dataset]] = {
    "hvtrain": hvtrain_source,
    "keras": keras_folder,
    "by-hand": by_hand,
    "by-hand-antialiased": partial(by_hand, antialias=True),
}


def main() -> None:
    """Takes batches of the pipeline that the command line names, and reports."""
    name, file_format, folder, num_images, threads, steps = sys.argv[1:]
    # All threads of the process share so many cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
    stopwatch = Stopwatch()
    options = tf.data.Options()
    options.threading.private_threadpool_size = int(threads)
    batches = PIPELINES[name](Path(folder), file_format, int(num_images)).with_options(options)

    @tf.function
    def take(images: tf.Tensor, labels: tf.Tensor) -> None:
        tf.debugging.assert_equal(tf.shape(images)[0], tf.shape(labels)[0])

    for step, (images, labels) in enumerate(batches.take(int(steps))):
        # A pipeline that gives other pixels would win by doing less.
        if not step:
            mean = float(tf.reduce_mean(images))
            assert images.shape == (BATCH_SIZE, *TRAINED) and images.dtype == tf.float32 and 0.2 < mean < 0.8, mean
        take(images, labels)
        stopwatch.step_ended()

    stopwatch.report(0, mean)
    sys.stdout.flush()
    os._exit(0)  # Threads that still read ahead would delay the exit.


if __name__ == "__main__":
    main()
