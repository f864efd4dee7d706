"""TFRecord files: how many records a file holds and where, damaged ones, and how to write such files.

Framing (tensorflow/core/lib/io/record_writer.h): length uint64, its CRC uint32, data, their CRC uint32.
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

HEADER_BYTES, FOOTER_BYTES = 12, 4
PIECE_RECORDS = 64
CORRUPTED = "corrupted record"


def scan_records(path: Path, check_lengths: bool = False) -> tuple["array[int]", str | None]:
    """Offset of each record, and the defect that keeps the rest of the file from being read, if there is one.

    The CRCs of the records' data are not checked. check_lengths: stop at a length whose CRC is wrong, since the bytes
    after it would be taken for records.
    """
    offsets, offset = array("Q"), 0
    try:
        file_bytes = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            while offset < file_bytes:
                file.seek(offset)
                header = file.read(HEADER_BYTES)
                length = struct.unpack("<Q", header[:8])[0] if len(header) == HEADER_BYTES else 0
                end = offset + HEADER_BYTES + length + FOOTER_BYTES
                place = f"record {len(offsets)} at byte {offset}"
                if end > file_bytes:
                    found = f"should end at byte {end}, but the file has {file_bytes} bytes"
                    return offsets, f"{place} {found}: it is truncated or damaged"
                if check_lengths and header[8:] != masked_crc(header[:8]):
                    return offsets, f"{place} has a length whose CRC is wrong: it is damaged"
                offsets.append(offset)
                offset = end
    except OSError as error:
        return offsets, f"cannot be read ({error.strerror})"
    return offsets, None if offsets else "is empty"


def masked_crc(data: bytes) -> bytes:
    """The CRC-32C of a few bytes as the format stores it.

    >>> masked_crc(bytes(8)).hex()
    '29039807'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def walk(path: bytes) -> Iterator[np.ndarray]:
    """The records of a file in turn, in pieces [n, 2] of (place, data). The data of a damaged record are empty."""
    name = path.decode()
    offsets, _ = scan_records(Path(name), check_lengths=True)
    reader = tf_record_random_reader(name)
    for begin in range(0, len(offsets), PIECE_RECORDS):
        piece = enumerate(offsets[begin : begin + PIECE_RECORDS], start=begin)
        yield np.array([(place_of(name, *record).encode(), _read(reader, record[1])) for record in piece], object)


def place_of(path: str, number: int, offset: int) -> str:
    return f"{path}, record {number} at byte {offset}"


def _read(reader: tf_record_random_reader, offset: int) -> bytes:
    """The data of a record; nothing if they are damaged."""
    with suppress(tf.errors.OpError, IndexError):
        return reader.read(offset)[0]
    return b""


def find_record(paths: Iterable[str], record: bytes, deadline_seconds: float) -> str | None:
    """The place of a record with these bytes; None if it is not found by a time of time.monotonic()."""
    for path in paths:
        offsets, _ = scan_records(Path(path))
        lengths = np.diff(np.append(np.asarray(offsets), Path(path).stat().st_size if offsets else ()))
        for number in np.flatnonzero(lengths == HEADER_BYTES + len(record) + FOOTER_BYTES):
            if _read(tf_record_random_reader(path), offsets[number]) == record:
                return place_of(path, int(number), offsets[number])
            if time.monotonic() > deadline_seconds:
                return None
    return None


def find_damage(counts: Mapping[str, int], message: str, skips: bool, deadline_seconds: float) -> str | None:
    """The file or record that TensorFlow's message is about, which names a byte at most, and what is wrong with it.

    counts: how many records the files held when they were opened. skips: known damage was left out then.
    """
    said = re.search(r"record at (\d+)", message)
    suspects = {int(said[1]), int(said[1]) - HEADER_BYTES} if said else set()
    for path, before in counts.items():
        offsets, problem = scan_records(Path(path), skips)
        if len(offsets) != before or (problem and not skips):
            return f"{path}: {problem or f'holds {len(offsets)} records and had {before} before'}"
        for number, offset in enumerate(offsets if suspects else ()):
            if offset in suspects and not _read(tf_record_random_reader(path), offset):
                return f"{place_of(path, number, offset)}: {CORRUPTED}"
        if time.monotonic() > deadline_seconds:
            break
    return None


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
