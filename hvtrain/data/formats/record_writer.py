"""Writes TFRecord files that dataset=tfrecord reads."""

from pathlib import Path

import numpy as np
import tensorflow as tf


def write_tfrecords(dir: str | Path, split: str, images: np.ndarray, labels: np.ndarray, num_files: int) -> list[Path]:
    """Writes images uint8 [n, h, w, c], as PNG, and labels [n] to num_files files.

    Example i goes to file i % num_files. A file gets its name when it is complete.
    """
    folder = Path(dir)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(num_files):
        path = folder / f"{split}-{number:05d}-of-{num_files:05d}.tfrecord"
        partial = path.with_suffix(".partial")
        with tf.io.TFRecordWriter(str(partial)) as writer:
            for image, label in zip(images[number::num_files], labels[number::num_files], strict=True):
                encoded = tf.io.encode_png(image).numpy()
                features = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[encoded])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(label)])),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
        paths.append(partial.rename(path))
    return paths
