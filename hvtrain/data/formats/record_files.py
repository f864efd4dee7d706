"""TFRecord files: counts and offsets of records, damaged records, and writing.

Framing (tensorflow/core/lib/io/record_writer.h): length uint64, its CRC uint32, data, their CRC
uint32.
"""

import re
import struct
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.python.lib.io.tf_record import tf_record_random_reader

HEADER_BYTES = 12
FOOTER_BYTES = 4
PIECE_RECORDS = 64
"""Records that walk() returns at a time."""
CORRUPTED = "corrupted record"


def scan_records(path: Path, check_lengths: bool = False) -> tuple["array[int]", str | None]:
    """Finds the records of a file by their lengths, without reading the data.

    The CRCs of the data are not checked.

    Args:
        check_lengths: Stop at a length whose CRC is wrong, since the bytes after it would be taken
            for records.

    Returns:
        The offset of each record, and the defect that hides the rest of the file, if there is one.
    """
    offsets = array("Q")
    offset = 0
    try:
        file_bytes = path.stat().st_size
        # Unbuffered: of a large record only the header is read.
        with path.open("rb", buffering=0) as file:
            while offset < file_bytes:
                file.seek(offset)
                header = file.read(HEADER_BYTES)
                length = 0
                if len(header) == HEADER_BYTES:
                    length = struct.unpack("<Q", header[:8])[0]
                end = offset + HEADER_BYTES + length + FOOTER_BYTES

                record = f"record {len(offsets)} at byte {offset}"
                if end > file_bytes:
                    return offsets, (
                        f"{record} should end at byte {end}, but the file has {file_bytes} bytes: "
                        "it is truncated or damaged"
                    )
                if check_lengths and header[8:] != masked_crc(header[:8]):
                    return offsets, f"{record} has a length whose CRC is wrong: it is damaged"
                offsets.append(offset)
                offset = end
    except OSError as error:
        return offsets, f"cannot be read ({error.strerror})"
    return offsets, None if offsets else "is empty"


def masked_crc(data: bytes) -> bytes:
    """The CRC-32C of a few bytes as the format stores it: rotated, plus a constant.

    >>> masked_crc(bytes(8)).hex()
    '29039807'
    """
    # Bit by bit, with the reflected polynomial of CRC-32C: only lengths, of 8 bytes, are checked.
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def walk(path: bytes) -> Iterator[np.ndarray]:
    """Reads the records of a file in turn, in pieces [n, 2] of (location, data).

    The data of a damaged record are empty.
    """
    # tf.data calls this function, and passes strings as bytes.
    name = path.decode()
    offsets, _ = scan_records(Path(name), check_lengths=True)
    reader = tf_record_random_reader(name)
    for begin in range(0, len(offsets), PIECE_RECORDS):
        piece = enumerate(offsets[begin : begin + PIECE_RECORDS], start=begin)
        rows = []
        for number, offset in piece:
            location = location_of(name, number, offset)
            rows.append((location.encode(), _read(reader, offset)))
        yield np.array(rows, object)


def location_of(path: str, number: int, offset: int) -> str:
    return f"{path}, record {number} at byte {offset}"


def _read(reader: tf_record_random_reader, offset: int) -> bytes:
    """Reads the data of a record; empty if they are damaged."""
    # TensorFlow raises IndexError at and beyond the end of a file.
    with suppress(tf.errors.OpError, IndexError):
        return reader.read(offset)[0]
    return b""


def find_record(paths: Iterable[str], record: bytes, deadline_seconds: float) -> str | None:
    """Finds the location of the record with these bytes.

    Args:
        deadline_seconds: The time of time.monotonic() at which to give up, with None.
    """
    record_bytes = HEADER_BYTES + len(record) + FOOTER_BYTES
    for path in paths:
        offsets, _ = scan_records(Path(path))
        ends = np.append(np.asarray(offsets), Path(path).stat().st_size if offsets else ())
        # Only records of the right length are read.
        for number in np.flatnonzero(np.diff(ends) == record_bytes):
            if _read(tf_record_random_reader(path), offsets[number]) == record:
                return location_of(path, int(number), offsets[number])
            if time.monotonic() > deadline_seconds:
                return None
    return None


def find_damage(
    counts: Mapping[str, int],
    message: str,
    skips: bool,
    deadline_seconds: float,
) -> str | None:
    """Finds the file or record that TensorFlow's message is about, and the defect in it.

    Args:
        counts: Records that the files held when they were opened.
        message: Names the byte of a record at most, never its file.
        skips: Damage that was known when the files were opened has been left out.
        deadline_seconds: The time of time.monotonic() at which to give up, with None.
    """
    match = re.search(r"record at (\d+)", message)
    # TensorFlow names the begin of the record's header, or of its data.
    suspects = {int(match[1]), int(match[1]) - HEADER_BYTES} if match else set()
    for path, count in counts.items():
        # Scanning lengths is fast, and reveals a file that was truncated or replaced.
        offsets, defect = scan_records(Path(path), skips)
        if len(offsets) != count or (defect and not skips):
            return f"{path}: {defect or f'holds {len(offsets)} records and had {count} before'}"
        for number, offset in enumerate(offsets if suspects else ()):
            if offset in suspects and not _read(tf_record_random_reader(path), offset):
                return f"{location_of(path, number, offset)}: {CORRUPTED}"
        if time.monotonic() > deadline_seconds:
            break
    return None


def write_tfrecords(
    dir: str | Path,
    split: str,
    images: np.ndarray,
    labels: np.ndarray,
    num_files: int,
) -> list[Path]:
    """Writes images and labels to TFRecord files, as dataset=tfrecord reads them.

    Example i goes to file i % num_files. A file gets its name when it is complete.

    Args:
        dir: The folder, which is made if need be.
        split: "train", "validation" or "test".
        images: uint8 [n, h, w, c], stored as PNG.
        labels: Whole numbers [n].

    Returns:
        The files' paths.
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
        # A run that is killed while it writes leaves no file that looks whole.
        paths.append(partial.rename(path))
    return paths
