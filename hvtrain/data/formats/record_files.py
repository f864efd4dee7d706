"""TFRecord files: names, counts and offsets of records, damaged records, and writing.

Framing (tensorflow/core/lib/io/record_writer.h): length uint64, its CRC uint32, data, their CRC
uint32. A file may be gzipped as a whole; its offsets are then those of the unpacked data.
"""

import gzip
import re
import struct
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.python.lib.io.tf_record import tf_record_random_reader

from hvtrain.data.formats.folders import left_out, split_files, visible

HEADER_BYTES = 12
FOOTER_BYTES = 4
PIECE_RECORDS = 64
"""Records that walk() returns at a time."""
CORRUPTED = "corrupted record"
EMPTY = "is empty"
GZIP_BEGIN = b"\x1f\x8b\x08"

# As tf.data, tensorflow_datasets and Kaggle name such files; TensorFlow's ImageNet has no suffix.
_NAME = re.compile(r"\.(tfrecords?|tfrec)(-\d+-of-\d+)?(\.gz)?$|-\d+-of-\d+(\.gz)?$", re.IGNORECASE)


def find_files(folder: Path) -> tuple[dict[str, list[str]], list[str]]:
    """Finds the TFRecord files of each split, in FOLDER/SPLIT* or in FOLDER/SPLIT/, sorted.

    Returns:
        The paths by split, and a warning about files of no split, if there are any.
    """
    entries = [path for path in visible(folder) if _record_files(path)]
    splits = split_files(entries)
    paths = {split: [file for path in parts for file in _record_files(path)] for split, parts in splits.items()}
    return paths, left_out(entries, [path for parts in splits.values() for path in parts])


def _record_files(path: Path) -> list[str]:
    """A TFRecord file itself, or those in a folder."""
    if path.is_dir():
        return [str(file) for file in visible(path) if file.is_file() and _NAME.search(file.name)]
    return [str(path)] if _NAME.search(path.name) else []


def is_gzipped(path: str | Path) -> bool:
    """True if a file is packed as a whole."""
    with Path(path).open("rb") as file:
        header = file.read(HEADER_BYTES)
    # A record of 559,903 bytes begins alike; then the CRC of its length is right.
    return header.startswith(GZIP_BEGIN) and header[8:] != masked_crc(header[:8])


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
        if is_gzipped(path):
            return _scan_gzipped(path)
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
    return offsets, None if offsets else EMPTY


def _scan_gzipped(path: Path) -> tuple["array[int]", str | None]:
    """As scan_records(), by unpacking the whole file."""
    offsets = array("Q")
    offset = 0
    try:
        with gzip.open(path) as file:
            header = file.read(HEADER_BYTES)
            while header:
                end = offset + HEADER_BYTES + FOOTER_BYTES
                if len(header) == HEADER_BYTES:
                    end += struct.unpack("<Q", header[:8])[0]
                # A damaged length may be huge: seeking stops at the end of the data.
                if header[8:] != masked_crc(header[:8]) or file.seek(end) < end:
                    return offsets, f"record {len(offsets)} at byte {offset} (unpacked) is truncated or damaged"
                offsets.append(offset)
                offset = end
                header = file.read(HEADER_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        return offsets, f"cannot be unpacked after record {len(offsets) - 1} ({error})"
    return offsets, None if offsets else EMPTY


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
    records = _records(name, offsets)
    for begin in range(0, len(offsets), PIECE_RECORDS):
        piece = enumerate(offsets[begin : begin + PIECE_RECORDS], start=begin)
        rows = []
        for number, offset in piece:
            location = location_of(name, number, offset)
            rows.append((location.encode(), next(records)))
        yield np.array(rows, object)


def first_records(path: str, number: int) -> list[bytes]:
    """The data of a file's first records, as far as they can be read."""
    packing = "GZIP" if is_gzipped(path) else ""
    records: list[bytes] = []
    with suppress(tf.errors.OpError):
        for record in tf.data.TFRecordDataset(path, packing).take(number).as_numpy_iterator():
            records.append(record)
    return records


def _records(path: str, offsets: Iterable[int]) -> Iterator[bytes]:
    """Reads a file's first records, one for each offset; empty if they are damaged."""
    if not is_gzipped(path):
        reader = tf_record_random_reader(path)
        for offset in offsets:
            yield _read(reader, offset)
        return

    # TensorFlow finds no record of a packed file by its offset.
    unpacked = tf.data.TFRecordDataset(path, compression_type="GZIP").as_numpy_iterator()
    for _ in offsets:
        record = b""
        with suppress(tf.errors.OpError, StopIteration):
            record = next(unpacked)
        yield record


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
        numbers = np.arange(len(offsets))
        records = _records(path, offsets)
        if not is_gzipped(path):
            # Only records of the right length are read.
            numbers = np.flatnonzero(np.diff(ends) == record_bytes)
            records = _records(path, (offsets[number] for number in numbers))
        for number, content in zip(numbers, records):
            if content == record:
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
        if is_gzipped(path):
            records = enumerate(_records(path, offsets))
            damaged = [number for number, record in records if not record][:1]
        else:
            numbers = [number for number, offset in enumerate(offsets) if offset in suspects]
            reader = tf_record_random_reader(path)
            damaged = [number for number in numbers if not _read(reader, offsets[number])]
        if damaged:
            return f"{location_of(path, damaged[0], offsets[damaged[0]])}: {CORRUPTED}"
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
