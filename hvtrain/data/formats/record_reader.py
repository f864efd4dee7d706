"""Single records of TFRecord files: all in turn past damaged ones, and the search for a damaged one."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.python.lib.io.tf_record import tf_record_random_reader

from hvtrain.data.formats.record_framing import FOOTER_BYTES, HEADER_BYTES, scan_records

PIECE_RECORDS = 64
CORRUPTED = "corrupted record"


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
    try:
        return reader.read(offset)[0]
    except (tf.errors.OpError, IndexError):
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
