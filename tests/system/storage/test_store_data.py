"""Data sets in object storage: the same order and bits as in a local folder, whatever the store does."""

from __future__ import annotations

import os
import threading
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest, write_tfrecords
from hvtrain.data.formats import tar_files
from hvtrain.data.formats.tar_files import find_members, members_ahead
from hvtrain.data.manifest import user_path
from hvtrain.data.sources.image_folder import ImageFolder
from hvtrain.data.sources.parquet import Parquet
from hvtrain.data.sources.segmentation_folder import SegmentationFolder
from hvtrain.data.sources.table import Table
from hvtrain.data.sources.text import Text
from hvtrain.data.sources.tfrecord import TFRecords
from hvtrain.data.sources.webdataset import web_dataset
from hvtrain.errors import ConfigError, DataError, StorageError
from hvtrain.system.storage import cache, remote
from hvtrain.system.storage import ranges as ranges_module
from hvtrain.system.storage.remote import READ_AT_ONCE
from shards import write_shards
from tiny_data import SHAPE, images_of, random_images, write_folder


@pytest.fixture(scope="module", autouse=True)
def buckets(server):
    server.bucket("data")


def image_folder(folder: Path):
    write_folder(folder / "train", *random_images(24))
    return lambda path: ImageFolder(path, SHAPE, flip=True)


def segmentation_folder(folder: Path):
    images, _ = random_images(12)
    for kind, pixels in (("images", images), ("masks", images % 3)):
        write_folder(folder / kind, pixels, np.zeros(12, int))
        (folder / "train").mkdir(exist_ok=True)
        (folder / kind / "class_0").rename(folder / "train" / kind)
        (folder / kind).rmdir()
    return lambda path: SegmentationFolder(path, SHAPE, num_classes=3)


def tfrecord(folder: Path):
    write_tfrecords(folder, "train", *random_images(24), num_files=3)
    return lambda path: TFRecords(path, SHAPE, num_classes=3, shuffle_buffer=7)


def parquet(folder: Path):
    images, labels = random_images(24)
    encoded = [tf.io.encode_png(image).numpy() for image in images]
    pq.write_table(
        pa.table({"image": encoded, "label": labels}), folder / "train.parquet", row_group_size=3
    )
    return lambda path: Parquet(path, SHAPE, num_classes=3, shuffle_groups=2)


def table(folder: Path):
    rows = np.random.default_rng(0).normal(size=(40, 2))
    for part, name in zip(np.split(rows, 2), ("a", "b")):
        lines = [f"{x},{y},{int(x > 0)}" for x, y in part]
        (folder / f"rows-{name}.csv").write_text("\n".join(["x,y,target", *lines, ""]))
    (folder / "rows-old").mkdir()
    for name in ("other.csv", "rows-old/c.csv"):
        (folder / name).write_text("no,table\n")
    return lambda path: Table(f"{path}/rows-*.csv", "target", num_test=10)


def text(folder: Path):
    (folder / "tale.txt").write_text("The quick brown fox jumps over the lazy dog. " * 300)
    return lambda path: Text(f"{path}/tale.txt", length=8, vocabulary_size=300)


KINDS = [image_folder, segmentation_folder, tfrecord, parquet, table, text]


def batches_of(source):
    request = StreamRequest(Topology(1, 2), 2, 5, 1, 3)
    training = list(source.training(request).take(4).as_numpy_iterator())
    return tf.nest.flatten(
        [training, list(source.evaluation("train", Topology(0, 2), 4).as_numpy_iterator())]
    )


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_order_bits_and_manifest_are_those_of_a_local_folder(make, store, tmp_path):
    """Also through a store that is overloaded, and that breaks off its answers."""
    open_source = make(tmp_path)
    local = open_source(str(tmp_path))
    address = store.put(tmp_path, f"data/{make.__name__}")
    faults = iter([503, 503, "cut", None, "cut", 500])
    store.fault = lambda request: next(faults, None)
    far = open_source(address)
    expected, actual = batches_of(local), batches_of(far)
    assert len(expected) > 4 and all(map(np.array_equal, expected, actual))
    assert far.manifest() == local.manifest()
    assert next(faults, None) is None
    assert not any("rows-old" in path for path, _ in parts_of(store))

    # Another process finds it there, and asks for the list, and for what nobody has read, alone.
    wait(members_ahead._parts.values())
    here = parts_of(store)
    cache._locks.clear()
    cache.forget_copies()
    store.requests.clear()
    assert all(map(np.array_equal, expected, batches_of(open_source(address))))
    assert {request.method for request in store.requests} <= {"GET", "HEAD"}
    assert not parts_of(store) & here


def parts_of(store) -> set[tuple[str, int | None]]:
    """The objects, or parts of them, that were read."""
    return {
        (request.path, request.first)
        for request in store.requests
        if request.method == "GET" and "list-type" not in request.path
    }


def put(store, name: str, **contents: bytes) -> str:
    for file, content in contents.items():
        with store.filesystem().open_output_stream(f"data/{name}/{file}") as stream:
            stream.write(content)
    return f"s3://data/{name}"


def test_a_copy_stays_as_it_is_and_another_start_takes_the_new_state(store):
    address = put(store, "replaced", a=b"old", b=b"same")
    folder = user_path(address)
    put(store, "replaced", a=b"newer")
    assert user_path(address) == folder and (folder / "a").read_bytes() == b"old"
    cache.forget_copies()
    newer = user_path(address)
    assert (
        newer != folder
        and (newer / "a").read_bytes() == b"newer"
        and (newer / "b").read_bytes() == b"same"
    )
    assert (folder / "a").read_bytes() == b"old"


@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_a_change_while_it_is_read_is_an_error(change, store):
    address = put(store, f"{change}-meanwhile", a=b"1", b=b"2")
    done = []

    def fault(request):
        if request.method == "GET" and request.path.endswith("/b") and not done:
            done.append(request)
            if change == "replaced":
                store.send("PUT", f"data/{change}-meanwhile/a", b"other")
            else:
                store.send("DELETE", f"data/{change}-meanwhile/a")

    store.fault = fault
    with pytest.raises(
        DataError, match=f"{address}( changed while it was read; start again|/a does not exist)"
    ):
        user_path(address)
    cache.forget_copies()
    assert user_path(address).is_dir()


ACCESS = "check this host's credentials and clock, and the account's permissions"
REFUSALS = {
    "no bucket": (
        "s3://no-bucket/x",
        None,
        "",
        "s3://no-bucket/x does not exist; check the bucket and the path",
    ),
    "no object": (
        "s3://data/none",
        None,
        "",
        "s3://data/none does not exist; check the bucket and the path",
    ),
    "denied": (
        "s3://data/one",
        403,
        "AccessDenied",
        rf"s3://data/one cannot be accessed \(ACCESS_DENIED.*{ACCESS}",
    ),
    "unknown key": ("s3://data/one", 403, "InvalidAccessKeyId", f"cannot be accessed .*{ACCESS}"),
    "expired": ("s3://data/one", 400, "ExpiredToken", f"cannot be accessed .*{ACCESS}"),
    "clock": ("s3://data/one", 403, "RequestTimeTooSkewed", f"cannot be accessed .*{ACCESS}"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_read_is_said_in_one_line_without_secrets(name, store):
    address, status, code, message = REFUSALS[name]
    put(store, "one", a=b"1")
    store.code = code
    store.fault = lambda request: status
    with pytest.raises(DataError, match=message) as caught:
        user_path(address)
    assert "hunter2" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.nightly  # The store's library waits for three seconds, and tries again itself.
def test_an_answer_that_stops_is_asked_for_again(store):
    address = put(store, "slow", a=bytes(100_000))
    gets = []

    def fault(request):
        if request.method == "GET" and request.path.endswith("/a"):
            gets.append(request)
            return "stall" if len(gets) == 1 else None
        return None

    store.fault = fault
    assert (user_path(address) / "a").read_bytes() == bytes(100_000) and len(gets) == 2


def test_patience_ends_in_one_line(store, monkeypatch):
    attempts = []

    def fail():
        attempts.append(1)
        raise OSError(
            "When reading 'a': AWS Error SLOW_DOWN (HTTP status 503) during GetObject operation: ? (Request ID: 7)"
        )

    place = remote.locate("s3://data/one")
    message = r"^s3://data/one failed in 6 attempts \(SLOW_DOWN \(HTTP status 503\) during GetObject\); check"
    with pytest.raises(DataError, match=message):
        place.attempt(fail)
    assert len(attempts) == 6


def test_addresses_without_a_store_or_with_a_password_are_refused(store):
    with pytest.raises(ConfigError, match=r"^s3://\*\*\*@data/x has a password in it"):
        user_path("s3://key:hunter2@data/x")
    with pytest.raises(
        ConfigError, match=r"no store is known for warp://; use s3://, gs://, abfs:// or hdfs://"
    ):
        user_path("warp://data/x")


def test_the_cache_is_bounded_and_keeps_what_is_used(store, monkeypatch):
    monkeypatch.setenv("HVTRAIN_CACHE_GIB", str(250 / 2**30))
    addresses = [put(store, f"part{number}", a=bytes(100)) for number in range(3)]
    first, second = map(user_path, addresses[:2])
    with pytest.raises(
        DataError,
        match=r"100 B do not fit in the cache .*: 200 B of 250 B are in use; wait until other runs end",
    ):
        user_path(addresses[2])
    # The first is free, as after the end of its process.
    cache._locks.pop(first.parent).close()
    third = user_path(addresses[2])
    assert not first.exists() and second.is_dir() and (third / "a").read_bytes() == bytes(100)

    monkeypatch.setenv("HVTRAIN_CACHE_GIB", str(50 / 2**30))
    cache.forget_copies()
    with pytest.raises(
        DataError,
        match=r"s3://data/part0 has 100 B, and the cache in .* may hold 50 B; set HVTRAIN_CACHE",
    ):
        user_path(addresses[0])
    monkeypatch.setenv("HVTRAIN_CACHE_GIB", "much")
    with pytest.raises(ConfigError, match="HVTRAIN_CACHE_GIB=much is not a number above 0"):
        user_path(addresses[0])


def test_ranks_of_a_host_bring_an_object_once(store):
    address = put(store, "shared", a=bytes(10), b=bytes(10))
    pids = []
    for _ in range(3):
        pid = os.fork()
        if not pid:
            os._exit(0 if (user_path(address) / "b").is_file() else 1)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    got = [
        request.path
        for request in store.requests
        if request.method == "GET" and "list-type" not in request.path
    ]
    assert sorted(got) == ["/data/shared/a", "/data/shared/b"]


def test_what_a_killed_process_left_is_no_copy(store):
    address = put(store, "killed", a=bytes(10), b=bytes(10))
    pid = os.fork()
    if not pid:
        remote.Remote.download = lambda *_: os._exit(9)
        user_path(address)
    assert os.waitpid(pid, 0)[1] == 9 << 8
    assert (user_path(address) / "b").read_bytes() == bytes(10)


@pytest.fixture
def shards(store, tmp_path, monkeypatch):
    """Two shards of 30 images in a folder and at an address, of which no member is kept with the headers."""
    monkeypatch.setattr(tar_files, "MAX_KEPT_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    write_shards(tmp_path / "shards", "train", *random_images(30), 2)
    address = store.put(tmp_path / "shards", f"data/{tmp_path.name}")
    return tmp_path / "shards", address


def open_shards(path, **options):
    return web_dataset(str(path), SHAPE, 3, image_key=["png"], **options)


def ranges(store, since: int = 0) -> list:
    return [
        request
        for request in store.requests[since:]
        if request.method == "GET" and ".tar" in request.path
    ]


def test_shards_are_read_in_parts_with_the_order_and_bits_of_a_folder(shards, store, monkeypatch):
    folder, address = shards
    faults = iter([503, "cut", None, "cut", 503])
    store.fault = lambda request: next(faults, None)
    local, far = open_shards(folder), open_shards(address)
    assert far.num_examples("train") == 30 and far.manifest() == local.manifest()
    faults = iter([503, "cut", None, "cut", 503])
    indexed = len(store.requests)
    expected, actual = batches_of(local), batches_of(far)
    assert all(map(np.array_equal, expected, actual)) and next(faults, None) is None

    # Each part came once, and the next epochs and other ranks take it from this host.
    parts = {(request.path, request.first, request.last) for request in ranges(store, indexed)}
    assert len(parts) > 10
    again = len(store.requests)
    assert all(map(np.array_equal, expected, batches_of(far)))
    # Streams read ahead, so that the second may meet more of them.
    assert not parts & {
        (request.path, request.first, request.last) for request in ranges(store, again)
    }

    # Without room nothing is kept.
    monkeypatch.setenv("HVTRAIN_CACHE_GIB", str(100 / 2**30))
    cache.forget_copies()
    unkept = open_shards(address)
    for _ in range(2):
        again = len(store.requests)
        assert (
            all(map(np.array_equal, expected, batches_of(unkept)))
            and len(ranges(store, again)) > 10
        )


def test_members_that_are_read_with_the_headers_are_not_asked_for_again(shards, store, monkeypatch):
    folder, address = shards
    monkeypatch.setattr(tar_files, "MAX_KEPT_BYTES", tar_files.READ_AHEAD_BYTES)
    far = open_shards(address)
    assert far.num_examples("train") == 30
    indexed = len(store.requests)
    assert all(map(np.array_equal, batches_of(open_shards(folder)), batches_of(far)))
    assert not ranges(store, indexed)


@pytest.mark.parametrize(
    "num_images",
    [400, pytest.param(100_000, marks=pytest.mark.nightly)],
)
def test_a_resume_asks_for_no_byte_of_an_earlier_example(num_images, store, tmp_path, monkeypatch):
    """At 90% of 100,000; what is read ahead is of the same epoch."""
    monkeypatch.setattr(tar_files, "MAX_KEPT_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    pixels = np.random.default_rng(0).integers(0, 256, (num_images, *SHAPE), np.uint8)
    paths = write_shards(tmp_path / "shards", "train", pixels, np.arange(num_images) % 3, 4)
    address = store.put(tmp_path / "shards", f"data/resumed-{num_images}")
    numbers = {
        (path.name, member["offset"], member["offset"] + member["size"]): int(
            member["name"].partition(".")[0]
        )
        for path in paths
        for member in find_members(path)[0]
    }
    batch_size = max(1, num_images // 1000)
    num_steps = num_images // batch_size
    order = StreamRequest(Topology(), batch_size, 5, 0, num_steps)
    number_of = {(image / np.float32(255)).tobytes(): number for number, image in enumerate(pixels)}
    local = open_shards(tmp_path / "shards")
    # Of a small data set more has to be left than is read ahead.
    resumed_at = num_steps * (9 if batch_size > 1 else 6) // 10
    earlier = {number_of[image] for image in images_of(local.training(order), resumed_at)}
    assert len(earlier) == resumed_at * batch_size

    def read(start_step: int) -> set[int]:
        """The numbers of the examples of which bytes were asked for until three batches are there."""
        far = open_shards(address)
        assert far.num_examples("train") == num_images
        since = len(store.requests)
        images_of(far.training(replace(order, start_step=start_step)), 3)
        return {
            numbers[Path(item.path).name, item.first, item.last + 1]
            for item in ranges(store, since)
        }

    resumed = read(resumed_at)
    assert len(resumed) >= 3 * batch_size and not resumed & earlier
    assert len(read(0) & earlier) >= 3 * batch_size, "the control: a run from its begin reads them"


def images(folder: Path):
    write_folder(folder / "train", *random_images(240))
    return lambda path: ImageFolder(path, SHAPE)


def row_groups(folder: Path):
    pixels, labels = random_images(240)
    encoded = [tf.io.encode_png(image).numpy() for image in pixels]
    for part in range(2):
        rows = pa.table({"image": encoded[part::2], "label": labels[part::2]})
        pq.write_table(rows, folder / f"train-{part}.parquet", row_group_size=3)
    return lambda path: Parquet(path, SHAPE, num_classes=3, shuffle_groups=2)


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize("make", [images, row_groups])
def test_training_begins_before_all_is_here(make, on_error, store, tmp_path):
    """And ends if the store fails then: nothing is left out as damaged."""
    open_source = make(tmp_path)
    address = store.put(tmp_path, f"data/late-{make.__name__}-{on_error}")
    far = open_source(address)
    far.on_error = on_error
    order = StreamRequest(Topology(), 2, 5, 0, 120)
    stream = far.training(order)
    answered = set()
    may_go_on = threading.Event()

    def hold_all_but_some(request):
        if request.first is not None and len(answered) >= 60:
            may_go_on.wait(60)
        answered.add((request.path, request.first))

    store.fault = hold_all_but_some
    first = images_of(stream, 1)
    assert 2 <= len(answered) <= 60 + READ_AT_ONCE and not may_go_on.is_set()
    may_go_on.set()
    assert first == images_of(open_source(str(tmp_path)).training(order), 1)
    store.fault = lambda request: 403 if request.first is not None else None
    with pytest.raises(StorageError, match=rf"^{address}/\S+ cannot be accessed \(ACCESS_DENIED"):
        try:
            images_of(stream)
        except tf.errors.OpError as error:
            raise far.explain(error) from None
    assert far.unreadable() == []


@pytest.mark.parametrize("change", ["replaced", "deleted", "denied"])
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_shards_that_change_or_cannot_be_read_end_the_stream(
    change, on_error, shards, store, monkeypatch
):
    """Nothing is left out as damaged because of its store."""
    folder, address = shards
    monkeypatch.setattr(ranges_module, "SECONDS_UNCHECKED", 0.0)
    far = open_shards(address)
    far.on_error = on_error
    stream = far.evaluation("train", Topology(), 4)
    images_of(stream, 1)
    name = "train-000000.tar"
    if change == "replaced":
        with store.filesystem().open_output_stream(f"{address[5:]}/{name}") as file:
            file.write((folder / name).read_bytes() + bytes(512))
        message = f"{address}/{name} has changed since this run opened it; start again once it no longer changes"
    elif change == "deleted":
        store.filesystem().delete_file(f"{address[5:]}/{name}")
        message = f"{address}/{name} (has changed|does not exist)"
    else:
        store.fault = lambda request: 403 if ".tar" in request.path else None
        message = rf"{address}/{name} cannot be accessed"
    cache._remote_files[str(Path(far.paths("train")[0]))].kept = None
    with pytest.raises(StorageError, match=message):
        try:
            images_of(stream)
        except tf.errors.OpError as error:
            raise far.explain(error) from None
