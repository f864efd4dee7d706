"""Input pipelines for one model: hvtrain's, Keras's, and those that its users write by hand. Compared by
`benchmarks input`.

All give shuffled batches of float32 pixels, 0 ... 1, and labels, endlessly, on the same number of
threads. Within a work of benchmarks.input.WORKS all do the same to an image, with two exceptions: Keras also resizes
files of the trained size, and crop-first resizes less of an image than the others, to other pixels.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from benchmarks.by_hand.common import make_setup
from benchmarks.clock import Stopwatch
from benchmarks.input import (
    AREAS,
    ASPECTS,
    BATCH_SIZE,
    CROP_FRACTION,
    NUM_CLASSES,
    TRAINED,
    WORKS,
)

SHUFFLED = 1000  # Examples in the buffers of the pipelines by hand.
AUTO = tf.data.AUTOTUNE


def hvtrain_source(folder: Path, file_format: str, work: str) -> tf.data.Dataset:
    """The source as the runner uses it, with the settings of the work."""
    settings = [
        f"dataset={file_format}",
        f"dataset.dir={folder}",
        f"dataset.image_shape={list(TRAINED)}".replace(" ", ""),
        "dataset.flip=false",
        f"train.batch_size={BATCH_SIZE}",
        *WORKS[work],
    ]
    if file_format != "image_folder":
        settings.append(f"dataset.num_classes={NUM_CLASSES}")
    setup = make_setup(overrides=settings)
    batches = setup.batches_from(0)
    if not setup.source.raw_batches:
        return batches
    # What the step does otherwise.
    return batches.map(
        lambda images, labels: (setup.source.finish(images), labels), num_parallel_calls=AUTO
    )


def keras_folder(folder: Path, file_format: str, work: str) -> tf.data.Dataset:
    """Keras's own, with its defaults; its users add Rescaling. Resizes by itself, not antialiased."""
    is_cropped = work == "central-crop"
    size = [round(side / CROP_FRACTION) if is_cropped else side for side in TRAINED[:2]]
    batches = keras.utils.image_dataset_from_directory(
        folder / "train",
        image_size=size,
        batch_size=BATCH_SIZE,
        crop_to_aspect_ratio=is_cropped,
        verbose=False,
    )
    crop = keras.layers.CenterCrop(*TRAINED[:2])
    rescale = keras.layers.Rescaling(1 / 255)
    scaled = batches.map(
        lambda images, labels: (rescale(crop(images)), labels), num_parallel_calls=AUTO
    )
    return scaled.repeat().prefetch(AUTO)


def by_hand(
    folder: Path, file_format: str, work: str, crops_first: bool = False
) -> tf.data.Dataset:
    """As the guides of TensorFlow write it: encoded images are shuffled, then decoded one by one, in parallel.

    Of a random crop, only the part of a JPEG that is needed is decoded. Random crops have the areas and aspects
    of Szegedy et al. (2015), as torchvision draws them; those of tf.image.sample_distorted_bounding_box are smaller.

    Args:
        crops_first: Crop the middle while decoding, and then resize it. Otherwise a central crop is made as ImageNet
            is validated and as Keras's layers do it: the square is resized, and then its border is cut off.
    """
    # Whoever writes it by hand knows the size of the files.
    height, width = map(int, folder.parent.name.split("x"))
    # Files of the right size need no resizing, and a pipeline by hand has none.
    is_resized = (height, width) != TRAINED[:2]

    def random_window(limits: tf.Tensor) -> tf.Tensor:
        """The first of ten draws that fits into the image."""
        areas = tf.random.uniform([10], *AREAS) * tf.cast(tf.reduce_prod(limits), tf.float32)
        aspects = tf.exp(tf.random.uniform([10], *map(math.log, ASPECTS)))
        sizes = tf.cast(
            tf.round(tf.sqrt(tf.stack([areas / aspects, areas * aspects], axis=1))), tf.int32
        )
        first = tf.argmax(tf.reduce_all(sizes <= limits, axis=1))
        size = tf.minimum(sizes[first], limits)
        corner = tf.cast(tf.random.uniform([2]) * tf.cast(limits - size + 1, tf.float32), tf.int32)
        return tf.concat([corner, size], axis=0)

    def window(encoded: tf.Tensor) -> tf.Tensor:
        """Top, left, height and width of the part that is used."""
        shape = tf.io.extract_jpeg_shape(encoded)
        if work == "random-crop":
            return random_window(shape[:2])
        side = tf.cast(CROP_FRACTION * tf.cast(tf.reduce_min(shape[:2]), tf.float32), tf.int32)
        return tf.concat([(shape[:2] - side) // 2, [side, side]], axis=0)

    def resized_square(image: tf.Tensor) -> tf.Tensor:
        """Resizes the central square, and cuts off its border."""
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        larger = [round(length / CROP_FRACTION) for length in TRAINED[:2]]
        image = tf.image.resize(image[top : top + side, left : left + side], larger)
        rows, columns = ((whole - kept) // 2 for whole, kept in zip(larger, TRAINED))
        return image[rows : rows + TRAINED[0], columns : columns + TRAINED[1]]

    def pixels(encoded: tf.Tensor) -> tf.Tensor:
        if work == "random-crop" or crops_first:
            image = tf.image.decode_and_crop_jpeg(encoded, window(encoded), channels=TRAINED[2])
        else:
            image = tf.io.decode_jpeg(encoded, channels=TRAINED[2])
        if work == "central-crop" and not crops_first:
            image = resized_square(image)
        elif is_resized:
            image = tf.image.resize(image, TRAINED[:2], antialias=work == "antialias")
        return tf.ensure_shape(tf.cast(image, tf.float32) / 255.0, TRAINED)

    readers = {"image_folder": _files, "tfrecord": _records, "parquet": _rows}
    examples = readers[file_format](folder)
    decoded = examples.map(lambda encoded, label: (pixels(encoded), label), num_parallel_calls=AUTO)
    return decoded.batch(BATCH_SIZE, drop_remainder=True).prefetch(AUTO)


def _files(folder: Path) -> tf.data.Dataset:
    paths = sorted(folder.glob("train/*/*.jpg"))
    labels = [int(path.parent.name.removeprefix("class_")) for path in paths]
    files = (
        tf.data.Dataset.from_tensor_slices((list(map(str, paths)), labels))
        .shuffle(len(paths))
        .repeat()
    )
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
    return (
        tf.data.Dataset.from_generator(batches, output_signature=spec)
        .unbatch()
        .shuffle(SHUFFLED)
        .repeat()
    )


PIPELINES: dict[str, Callable[[Path, str, str], tf.data.Dataset]] = {
    "hvtrain": hvtrain_source,
    "keras": keras_folder,
    "by-hand": by_hand,
    "crop-first": partial(by_hand, crops_first=True),
}


def main() -> None:
    """Takes batches of the pipeline that the command line names, and reports."""
    name, work, file_format, folder, threads, steps = sys.argv[1:]
    # All threads of the process share so many cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
    stopwatch = Stopwatch()
    options = tf.data.Options()
    options.threading.private_threadpool_size = int(threads)
    batches = PIPELINES[name](Path(folder), file_format, work).with_options(options)

    @tf.function
    def take(images: tf.Tensor, labels: tf.Tensor) -> None:
        tf.debugging.assert_equal(tf.shape(images)[0], tf.shape(labels)[0])

    for step, (images, labels) in enumerate(batches.take(int(steps))):
        # A pipeline that gives other pixels would win by doing less.
        if not step:
            mean = float(tf.reduce_mean(images))
            assert (
                images.shape == (BATCH_SIZE, *TRAINED)
                and images.dtype == tf.float32
                and 0.2 < mean < 0.8
            ), mean
        take(images, labels)
        stopwatch.step_ended()

    stopwatch.report(0, mean)
    sys.stdout.flush()
    os._exit(0)  # Threads that still read ahead would delay the exit.


if __name__ == "__main__":
    main()
