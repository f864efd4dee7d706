"""Whatever is in the files of a data set: examples, or a DataError; no other exception, no hang, no flood of memory."""

from __future__ import annotations

import gzip
import io
import resource
import struct
import tempfile
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvtrain.core.topology import Topology
from hvtrain.data import Source, StreamRequest, write_tfrecords
from hvtrain.data.formats.record_files import masked_crc, scan_records
from hvtrain.data.formats.row_groups import Columns, pixel_type, read_footer, read_group
from hvtrain.data.source import reason
from hvtrain.data.sources.file_source import FileSource
from hvtrain.data.sources.image_folder import ImageFolder
from hvtrain.data.sources.keras_datasets import read_idx
from hvtrain.data.sources.tfrecord import TFRecords
from hvtrain.errors import DataError

SHAPE = (6, 6, 1)
IMAGES = np.random.default_rng(0).integers(0, 256, (8, *SHAPE), np.uint8)
LABELS = np.arange(8) % 2


def examples(number: int):
    """Settings for this number of examples, the same in every run."""
    unhealthy = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=unhealthy,
    )


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Bytes changed, cut out, doubled, put in; cut off at the end. Mostly near the beginning, where headers are."""
    places = st.one_of(st.integers(0, 40), st.integers(0, 5000), st.integers(-40, -1))
    bits = [(draw(places), draw(st.integers(0, 255))) for _ in range(draw(st.integers(0, 6)))]
    put = draw(st.binary(max_size=12))
    place, length = draw(places), draw(st.integers(0, 30))
    end = draw(st.one_of(st.none(), st.none(), st.integers(0, 3000)))

    def mutate(data: bytes) -> bytes:
        changed = bytearray(data)
        for at, value in bits:
            if changed:
                changed[at % len(changed)] = value
        at = place % (len(changed) + 1)
        changed[at : at + length] = put
        return bytes(changed[:end])

    return mutate


def idx_file(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def outcome(source: Source, batches: tf.data.Dataset) -> list | DataError:
    """Outcome for a run: batches, or what explain() makes of TensorFlow's error."""
    try:
        return list(batches.as_numpy_iterator())
    except tf.errors.OpError as error:
        explained = source.explain(error)
        assert isinstance(explained, DataError), f"{type(error).__name__}: {error}"
        assert "\n" not in str(explained)
        return explained


def read_or_told(source: FileSource, *batch: np.ndarray, place: str) -> None:
    """One example is read as streams read it, or located with a reason."""
    try:
        with tf.device("CPU:0"):
            _, labels = source.retry_reader("train", Topology())(*map(tf.constant, batch))
        why = "" if labels[0] < 0 else None
    except tf.errors.OpError as error:
        why = reason(error)
    if why is not None:
        found = source.locate("train", Topology(), batch, why)
        assert found.location == place and found.problem


@examples(300)
@given(mutate=mutations(), packed=st.booleans(), inside=st.booleans())
def test_idx_files(mutate, packed, inside, tmp_path):
    data = idx_file(IMAGES[..., 0])
    data = mutate(data) if inside else data
    data = gzip.compress(data, 1) if packed else data
    path = tmp_path / ("images.gz" if packed else "images")
    path.write_bytes(data if inside else mutate(data))
    try:
        assert read_idx(path, 3).dtype == np.uint8
    except DataError as error:
        assert str(path) in str(error)


@pytest.fixture(scope="module")
def records():
    """(path, its bytes, one stream for each way with damage): reading again what lies under path by now."""
    with tempfile.TemporaryDirectory() as folder:
        (path,) = write_tfrecords(folder, "train", IMAGES, LABELS, num_files=1)
        sources = []
        for on_error in ("stop", "skip"):
            source = TFRecords(folder, SHAPE, 2, shuffle_buffer=4)
            source.on_error = on_error
            sources.append((source, source.training(StreamRequest(Topology(), 4, 1, 0, 2)).take(3)))
        yield path, path.read_bytes(), sources


@examples(150)
@given(mutate=mutations())
def test_records_one_by_one(mutate, records):
    """Each that the lengths in the file lead to: read, parsed and decoded as streams do it, or told why not."""
    path, whole, (_, (skip, _)) = records
    path.write_bytes(mutate(whole))
    for check_lengths in (False, True):
        offsets, problem = scan_records(path, check_lengths)
        assert len(offsets) <= len(whole) // 16 + 4 and (problem or offsets)
    skip._scans.clear()  # A run meets no more than one version of a file.
    for number, offset in enumerate(offsets):
        # As a stream gives it after a damaged one: without its data.
        read_or_told(
            skip,
            np.array([b""], object),
            np.array([number]),
            place=f"{path}, record {number} at byte {offset}",
        )


@examples(8)
@given(mutate=mutations())
def test_streams_of_records(mutate, records):
    """Damaged after they were counted, which is the harder case."""
    path, whole, sources = records
    path.write_bytes(mutate(whole))
    for source, batches in sources:
        found = outcome(source, batches)
        assert isinstance(found, DataError) or [len(labels) for _, labels in found] == [4, 4, 4]


def encoded_images() -> list[bytes]:
    color = np.random.default_rng(1).integers(0, 256, (12, 9, 3), np.uint8)
    bmp = struct.pack(
        "<2sIHHIIiiHHIIiiII", b"BM", 54 + 12 * 12, 0, 0, 54, 40, 4, -12, 1, 24, 0, 0, 0, 0, 0, 0
    )
    gif = b"GIF89a\2\0\2\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\2\0\2\0\0\2\3\x44\x02\x05\0;"
    return [
        tf.io.encode_png(color).numpy(),
        tf.io.encode_jpeg(color).numpy(),
        tf.io.encode_jpeg(color, "rgb", progressive=True).numpy(),
        bmp + bytes(12 * 12),
        gif,
    ]


@pytest.fixture(scope="module")
def images():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "train" / "a"
        folder.mkdir(parents=True)
        for number in range(4):
            (folder / f"{number}.png").write_bytes(tf.io.encode_png(IMAGES[number]).numpy())
        sources = []
        for on_error in ("stop", "skip"):
            source = ImageFolder(name, (6, 6, 3))
            source.on_error = on_error
            sources.append((source, source.training(StreamRequest(Topology(), 4, 1, 0, 1)).take(1)))
        yield folder / "1.png", encoded_images(), sources


@examples(300)
@given(mutate=mutations(), kind=st.integers(0, 4))
def test_images_one_by_one(mutate, kind, images):
    """Decoded as streams do it, or told why not."""
    path, whole, ((source, _), _) = images
    path.write_bytes(mutate(whole[kind]))
    read_or_told(source, np.array([1]), place=str(path))


@pytest.mark.nightly
@examples(6)
@given(mutate=mutations(), kind=st.integers(0, 4))
def test_streams_of_images(mutate, kind, images):
    path, whole, ((stop, stops), (skip, skips)) = images
    path.write_bytes(mutate(whole[kind]))
    found = outcome(stop, stops)
    assert not isinstance(found, DataError) or str(path) in str(found)
    found = outcome(skip, skips)
    assert not isinstance(found, DataError) and found[0][0].shape == (4, 6, 6, 3)


def parquet_file(image: pa.Array) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"image": image, "label": LABELS}), file, row_group_size=4)
    return file.getvalue()


@examples(200)
@given(mutate=mutations(), encoded=st.booleans())
def test_parquet_files(mutate, encoded, tmp_path):
    pixels = [tf.io.encode_png(one).numpy() if encoded else one.ravel().tolist() for one in IMAGES]
    data = parquet_file(pa.array(pixels, pa.binary() if encoded else pa.list_(pa.uint8())))
    path, columns = tmp_path / "train.parquet", Columns("image", "label", SHAPE, 2)
    path.write_bytes(mutate(data))
    try:
        groups, schema = read_footer(path)
        for group in groups:
            pixel_type(path, schema, columns)
            images, labels, wrong = read_group(group, columns)
            assert len(images) == len(labels) == group.num_rows and set(
                np.flatnonzero(labels < 0)
            ) == set(wrong)
    except DataError as error:
        assert str(path) in str(error) and "\n" not in str(error)


def png_of(width: int, height: int, rows: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def jpeg_of(width: int, height: int) -> bytes:
    data = bytearray(tf.io.encode_jpeg(np.zeros((8, 8, 3), np.uint8)).numpy())
    at = data.find(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.nightly
def test_files_that_claim_more_than_there_is_take_no_memory(tmp_path, images, records):
    """A header of 2^32 x 2^32, a .gz that unpacks to 256 MB, a record of 2^60 bytes, images of 65,535 x 65,535."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in ("images", "images.gz"):
        for sizes in ((2**32 - 1,) * 3, (2**16, 2**16, 2**16), (10, 28, 28)):
            data = struct.pack(">BBBB3I", 0, 0, 8, 3, *sizes)
            if name.endswith(".gz"):
                packer = zlib.compressobj(1, wbits=31)
                zeros = 256 if sizes[0] == 10 else 1
                pieces = [
                    packer.compress(data),
                    *(packer.compress(bytes(2**20)) for _ in range(zeros)),
                    packer.flush(),
                ]
                data = b"".join(pieces)
            (tmp_path / name).write_bytes(data)
            with pytest.raises(
                DataError, match=r"claims .* bytes|bytes expected after|cannot be read"
            ):
                read_idx(tmp_path / name, 3)

    path, whole, _ = records
    length = struct.pack("<Q", 2**60)
    path.write_bytes(length + masked_crc(length) + bytes(64))
    assert len(scan_records(path)[0]) == 0
    # A run counts first, and never gives TensorFlow a record that cannot be there.
    for on_error, allows in (
        ("stop", pytest.raises(DataError, match="should end at byte")),
        ("skip", nullcontext()),
    ):
        source = TFRecords(str(path.parent), SHAPE, 2)
        source.on_error = on_error
        with allows:
            assert source.num_examples("train") == 0

    path.write_bytes(whole + length + masked_crc(length) + bytes(64))
    source = TFRecords(str(path.parent), SHAPE, 2)
    source.on_error = "skip"
    assert len(list(source.training(StreamRequest(Topology(), 4, 1, 0, 2)).take(6))) == 6, (
        "not the record behind them"
    )

    path, _, ((stop, stops), _) = images
    big = [
        png_of(65535, 65535, bytes(1000)),
        png_of(2**31 - 1, 2**31 - 1, b""),
        jpeg_of(65535, 65535),
    ]
    big += [jpeg_of(65500, 65500), jpeg_of(20000, 20000), png_of(12000, 12000, bytes(1000))]
    big += [b"GIF89a\xff\xff\xff\xff\x80\0\0" + bytes(6) + b",\0\0\0\0\xff\xff\xff\xff\0\2\2D\1\0;"]
    big += [
        struct.pack(
            "<2sIHHIIiiHHIIiiII",
            b"BM",
            54,
            0,
            0,
            54,
            40,
            *(2**31 - 1,) * 2,
            1,
            24,
            0,
            0,
            0,
            0,
            0,
            0,
        )
    ]
    for data in big:
        path.write_bytes(data)
        assert str(outcome(stop, stops)).startswith(f"{path}: ")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    assert grown < 200, f"{grown} MB"
