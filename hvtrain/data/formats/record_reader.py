"""Single records of TFRecord files: all in turn past damaged ones, one at an offset, one found again."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.python.lib.io.tf_record import tf_record_random_reader

from hvtrain.data.formats.record_framing import HEADER_BYTES, scan_records
from hvtrain.data.source import reason

PIECE_RECORDS = 64


def walk(path: bytes) -> Iterator[np.ndarray]:
    """Records of a file in turn, in pieces [n, 2] of (key, data); of a damaged record the data are empty."""
    offsets, _ = scan_records(Path(path.decode()), check_lengths=True)
    reader = tf_record_random_reader(path.decode())
    for begin in range(0, len(offsets), PIECE_RECORDS):
        piece = []
        for number, offset in enumerate(offsets[begin : begin + PIECE_RECORDS], start=begin):
            try:
                data = reader.read(offset)[0]
            except (tf.errors.OpError, IndexError):
                data = b""
            piece.append((f"{number} {offset} ".encode() + path, data))
        yield np.array(piece, object)


def read_at(key: str) -> tuple[str, bytes | None, str]:
    """The place of a record of walk, for people; its data, or None and why they cannot be read."""
    number, offset, path = key.split(" ", 2)
    place = f"{path}, record {number} at byte {offset}"
    try:
        return place, tf_record_random_reader(path).read(int(offset))[0], ""
    except tf.errors.OpError as error:
        return place, None, "corrupted record" if isinstance(error, tf.errors.DataLossError) else reason(error)
    except IndexError:
        return place, None, "the file ends before it"


def fingerprints(records: tf.Tensor) -> tf.Tensor:
    """Strings [n] that tell records [n] apart."""
    return tf.strings.as_string(tf.bitcast(tf.fingerprint(records), tf.int64))


def find_fingerprint(paths: Iterable[str], wanted: str, deadline_seconds: float) -> str | None:
    """The key of a record with that fingerprint; None when it is not found by a time of time.monotonic."""
    for path in paths:
        number = 0
        try:
            for records in tf.data.TFRecordDataset(path).batch(PIECE_RECORDS).prefetch(1):
                found = np.flatnonzero(fingerprints(records).numpy() == wanted.encode())
                if found.size:
                    number += int(found[0])
                    return f"{number} {scan_records(Path(path))[0][number]} {path}"
                number += len(records)
                if time.monotonic() > deadline_seconds:
                    return None
        except tf.errors.OpError:
            continue  # Damaged itself, but it is another damage that is looked for.
    return None


def find_corrupted(paths: Iterable[str], message: str, deadline_seconds: float) -> tuple[str, str] | None:
    """The place of the record that TensorFlow's message about damage is of, which names no file; and what it has."""
    said = re.search(r"(?:corrupted|truncated) record at (\d+)", message)
    damaged: tuple[str, str] | None = None
    for path in paths if said else ():
        if time.monotonic() > deadline_seconds:
            break
        offsets, problem = scan_records(Path(path))
        for offset in {int(said[1]), int(said[1]) - HEADER_BYTES}:  # type: ignore[index]
            number = int(np.searchsorted(np.asarray(offsets), offset))
            if number < len(offsets) and offsets[number] == offset:
                place, record, why = read_at(f"{number} {offset} {path}")
                if record is None:
                    return place, why
        if problem:  # It was whole when it was counted.
            damaged = damaged or (path, problem)
    return damaged


def find_changed(counts: Mapping[str, int], check_lengths: bool, deadline_seconds: float) -> tuple[str, str] | None:
    """A file that holds another number of records than when it was opened, and what it holds."""
    for path, before in counts.items():
        now = len(scan_records(Path(path), check_lengths)[0])
        if now != before:
            return path, f"holds {now} records and had {before} before"
        if time.monotonic() > deadline_seconds:
            break
    return None
