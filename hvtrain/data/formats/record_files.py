"""Finds, counts, reads and writes the records of TFRecord files, including files with damaged records.

A record (tensorflow/core/lib/io/record_writer.h) is the length of its data (uint64), the CRC of the
length (uint32), the data, and their CRC (uint32). A file may be gzipped as a whole; offsets then refer
to the unpacked data.
"""

import gzip
import math
import re
import struct
import zlib
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import Tensor
from tensorflow.data import Dataset
from tensorflow.python.lib.io.tf_record import tf_record_random_reader

from hvtrain.data.description import listed
from hvtrain.data.formats.folders import visible

HEADER_BYTES = 12
FOOTER_BYTES = 4
CORRUPTED = "corrupted record"
EMPTY = "is empty"
GZIP_BEGIN = b"\x1f\x8b\x08"

# Names as in tf.data, tensorflow_datasets and on Kaggle; the files of
# TensorFlow's ImageNet have no suffix.
_NAME = re.compile(r"\.(tfrecords?|tfrec)(-\d+-of-\d+)?(\.gz)?$|-\d+-of-\d+(\.gz)?$", re.IGNORECASE)


def files_of(path: Path) -> list[Path]:
    """Lists the TFRecord files in a folder, sorted; for a TFRecord file, only the file itself."""
    paths = visible(path) if path.is_dir() else [path]
    return [file for file in paths if file.is_file() and _NAME.search(file.name)]


def compression_type(path: str | Path) -> str:
    """Returns tf.data's name for the compression of a whole file: GZIP, or empty for none."""
    with Path(path).open("rb") as file:
        header = file.read(HEADER_BYTES)
    # A length of 559,903 bytes begins with the same bytes as gzip, but
    # is followed by its correct CRC.
    is_packed = header.startswith(GZIP_BEGIN) and header[8:] != masked_crc(header[:8])
    return "GZIP" if is_packed else ""


def scan_records(
    path: Path, check_lengths: bool = False, limit: float = math.inf
) -> tuple["array[int]", str | None]:
    """Finds the records of a file by their lengths, without reading the data.

    The CRCs of the data are not checked. A gzipped file is unpacked as a whole.

    Args:
        check_lengths: Stop at a length whose CRC is wrong, since the bytes after it would be taken
            for records. Gzipped files are always checked: skipping a huge wrong length costs more than the CRCs.
        limit: Stop after this many records.

    Returns:
        The offset of each record in bytes, and the defect that hides the rest of the file, or None.
    """
    offsets = array("Q")
    offset = 0
    try:
        is_packed = bool(compression_type(path))
        file_bytes = path.stat().st_size
        # Unbuffered, so that only the header of a large record is read.
        with gzip.open(path) if is_packed else path.open("rb", buffering=0) as file:
            while len(offsets) < limit:
                header = file.read(HEADER_BYTES)
                if not header:
                    break
                record = f"record {len(offsets)} at byte {offset}"
                if (check_lengths or is_packed) and header[8:] != masked_crc(header[:8]):
                    problem = "has a length whose CRC is wrong: it is truncated or damaged"
                    return offsets, f"{record} {problem}"

                # A truncated header counts as a length of 0, so the record ends beyond the file.
                length = 0
                if len(header) == HEADER_BYTES:
                    length = struct.unpack("<Q", header[:8])[0]
                end = offset + HEADER_BYTES + length + FOOTER_BYTES

                if is_packed:
                    # Seeking stops at the end of the unpacked data.
                    file_bytes = file.seek(end)
                if end > file_bytes:
                    return offsets, (
                        f"{record} should end at byte {end}, but the file has {file_bytes} bytes: "
                        "it is truncated or damaged"
                    )

                offsets.append(offset)
                offset = end
                file.seek(end)
    except (OSError, EOFError, zlib.error) as error:
        progress = f" after record {len(offsets) - 1}" if offsets else ""
        return offsets, f"cannot be read{progress} ({getattr(error, 'strerror', None) or error})"
    return offsets, None if offsets else EMPTY


def masked_crc(data: bytes) -> bytes:
    """Returns the CRC-32C of a few bytes as the format stores it: rotated, plus a constant.

    >>> masked_crc(bytes(8)).hex()
    '29039807'
    """
    # Computed bit by bit, with the reflected polynomial of CRC-32C. This is fast enough, since only
    # 8-byte lengths are checked.
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def first_records(path: str, count: int) -> list[bytes]:
    """Reads the data of a file's first `count` records, up to the first that is damaged."""
    records = []
    # Only records with intact lengths are read, since TensorFlow crashes at a length of 2^60.
    count = len(scan_records(Path(path), check_lengths=True, limit=count)[0])
    with suppress(tf.errors.OpError):
        # extend() keeps the records that were read before an error.
        records.extend(
            tf.data.TFRecordDataset(path, compression_type(path)).take(count).as_numpy_iterator()
        )
    return records


def features_of(record: bytes) -> Any:
    """Returns the features of a tf.train.Example as protobuf's map, which gives an empty feature for a missing key.

    The map is empty if the record is not an Example.
    """
    example = tf.train.Example()
    with suppress(Exception):  # protobuf's errors are of several types.
        example.ParseFromString(record)
    return example.features.feature


def example_problem(record: bytes, image_key: str, label_key: str) -> str:
    """Explains why a record does not hold an encoded image with one label.

    Returns an empty text for a record that does, and for one that is not an Example.
    """
    features = features_of(record)
    if not features:
        return ""
    kinds = {name: feature.WhichOneof("kind") for name, feature in sorted(features.items())}
    for setting, key in (("image_key", image_key), ("label_key", label_key)):
        if not kinds.get(key):
            shown = [
                f"{name} ({(kind or 'empty').removesuffix('_list')})"
                for name, kind in kinds.items()
            ]
            return (
                f"has no feature {key}, but {listed(shown)}; set dataset.{setting} to the right one"
            )
    if kinds[image_key] != "bytes_list":
        return (
            f"has numbers in {image_key}, and an encoded image is needed; "
            "write the images with tf.io.encode_png"
        )
    num_labels = len(getattr(features[label_key], kinds[label_key]).value)
    if num_labels != 1:
        return f"has {num_labels} values in {label_key}, and one is needed; for a one-hot label, write the index"
    return ""


def stream_records(
    path: Tensor, compression: Tensor, num_records: Tensor, first_code: Tensor
) -> Dataset:
    """Streams the records of a file as (data, code), where code is unique among all files.

    A damaged record, and every record after it in the file, has empty data but keeps its code. So the damage
    can be located and reported before any error ends the stream.

    Args:
        compression: See compression_type().
        num_records: The number of records that scan_records() found.
        first_code: The code of the file's first record; the others count up from it.
    """
    # No more than num_records are read: TensorFlow might crash at a damaged length, such as 2^60.
    records = tf.data.TFRecordDataset(path, compression_type=compression).take(num_records)
    # The range bounds the attempts: TensorFlow would try forever to open a missing file.
    numbered = Dataset.zip(records, Dataset.range(num_records)).ignore_errors()
    readable = numbered.map(lambda record, _: record)
    blank = Dataset.from_tensors(b"").repeat()
    codes = Dataset.range(first_code, first_code + num_records)
    return Dataset.zip(readable.concatenate(blank), codes)


def read_record(path: str, offset: int) -> bytes:
    """Reads the data of the record at an offset in bytes; empty if it is damaged. Not for gzipped files."""
    # TensorFlow raises IndexError at and beyond the end of a file.
    with suppress(tf.errors.OpError, IndexError):
        return tf_record_random_reader(path).read(offset)[0]
    return b""


def write_tfrecords(
    dir: str | Path, split: str, images: np.ndarray, labels: np.ndarray, num_files: int
) -> list[Path]:
    """Writes images and labels to TFRecord files that dataset=tfrecord reads.

    Example i goes to file i % num_files. A file gets its final name only once it is complete.

    Args:
        dir: The folder, which is created if it does not exist.
        split: "train", "validation" or "test".
        images: uint8 [n, h, w, c], stored as PNG.
        labels: Whole numbers [n].
        num_files: Number of files.

    Returns:
        The paths of the files.
    """
    folder = Path(dir)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(num_files):
        path = folder / f"{split}-{number:05d}-of-{num_files:05d}.tfrecord"
        partial = path.with_suffix(".partial")
        examples = zip(images[number::num_files], labels[number::num_files], strict=True)
        with tf.io.TFRecordWriter(str(partial)) as writer:
            for image, label in examples:
                png = tf.train.BytesList(value=[tf.io.encode_png(image).numpy()])
                features = {
                    "image": tf.train.Feature(bytes_list=png),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(label)])),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
        # A process killed while writing leaves no file that looks complete.
        paths.append(partial.rename(path))
    return paths
