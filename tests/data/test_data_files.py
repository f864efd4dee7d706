"""MNIST, Fashion-MNIST and CIFAR-10: their files, damaged files, and no files at all."""

from __future__ import annotations

import gzip
import struct
import threading
import time
from itertools import chain
from pathlib import Path

import keras
import numpy as np
import pytest

from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest
from hvtrain.data.sources import keras_datasets
from hvtrain.data.sources.keras_datasets import (
    CIFAR_FILES,
    DEBIAN_FOLDER,
    IDX_NAMES,
    cifar10,
    fashion_mnist,
    mnist,
    read_idx,
)
from hvtrain.errors import DataError


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def mnist_folder(tmp_path: Path) -> Path:
    """30 training and 10 test images; two of the files gzipped, two plain."""
    random = np.random.default_rng(0)
    for part, count, pack in (("train", 30, gzip.compress), ("t10k", 10, bytes)):
        images, labels = random.integers(0, 256, (count, 28, 28)), np.arange(count) % 10
        suffix = ".gz" if pack is gzip.compress else ""
        (tmp_path / f"{part}-images-idx3-ubyte{suffix}").write_bytes(pack(idx_bytes(images)))
        (tmp_path / f"{part}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx_bytes(labels)))
    return tmp_path


@pytest.fixture
def offline(tmp_path: Path, monkeypatch) -> None:
    """No network, an empty Keras cache, no Debian package."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setattr("hvtrain.data.sources.keras_datasets.is_reachable", lambda host: False)
    monkeypatch.setattr(
        "hvtrain.data.sources.keras_datasets.DEBIAN_FOLDER", tmp_path / "no-package"
    )


def test_a_folder_of_idx_files_plain_and_gzipped(mnist_folder):
    source = mnist(dir=str(mnist_folder), num_validation=5)
    assert source.origin == f"dataset.dir={mnist_folder}"
    assert [source.num_examples(split) for split in source.SPLITS] == [25, 5, 10]
    images, labels = next(source.evaluation("test", Topology(), 10).as_numpy_iterator())
    assert images.shape == (10, 28, 28, 1) and labels.tolist() == list(range(10))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:100], r"7840 bytes expected after the header, at least 84 found"),
        (lambda data: data + b"x", r"7840 bytes expected after the header, at least 7841 found"),
        (lambda data: data[:9], r" cannot be read \(unpack requires a buffer of 12 bytes\)"),
        (lambda data: b"\x00\x00\x08\x01" + data[4:], r"starts with 00000801, not 00000803"),
        (lambda data: b"<htm" + data[4:], r"starts with 3c68746d, not 00000803"),
        (
            lambda data: data[:7] + b"\x09" + data[8:],
            r"7056 bytes expected after the header, at least 7057 found",
        ),
    ],
)
def test_damaged_idx_files_are_named_with_what_was_found(mnist_folder, damage, message):
    path = mnist_folder / "t10k-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"{path}:? ?{message}"):
        mnist(dir=str(mnist_folder)).num_examples("train")


def test_a_truncated_gzip_file_is_named(mnist_folder):
    path = mnist_folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match=rf"{path} cannot be read \(.+\); the file may be damaged"):
        read_idx(path, 3)
    path.write_bytes(b"not gzip at all")
    with pytest.raises(DataError, match=rf"{path} cannot be read \(Not a gzipped file"):
        read_idx(path, 3)


def test_idx_labels_are_checked(mnist_folder):
    path = mnist_folder / "t10k-labels-idx1-ubyte"
    path.write_bytes(idx_bytes(np.arange(9)))
    with pytest.raises(DataError, match=r"holds 10 images but .*labels-idx1-ubyte holds 9 labels"):
        mnist(dir=str(mnist_folder)).num_examples("train")
    path.write_bytes(idx_bytes(np.array([0, 1, 2, 10, 4, 5, 6, 11, 8, 9])))
    with pytest.raises(
        DataError, match=r"mnist, test .*: label 10 at index 3 is outside 0 \.\.\. 9"
    ):
        mnist(dir=str(mnist_folder), num_validation=0).num_examples("train")


def test_a_folder_that_lacks_a_file_is_refused_even_when_the_package_is_there(mnist_folder):
    (mnist_folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"lacks t10k-labels-idx1-ubyte; put train-images"):
        fashion_mnist(dir=str(mnist_folder))


@pytest.mark.parametrize(
    ("open_source", "words"),
    [
        (mnist, [*IDX_NAMES, "dataset.dir=FOLDER", "storage.googleapis.com does not answer"]),
        (fashion_mnist, [*IDX_NAMES, "dataset.dir=FOLDER", "Debian package dataset-fashion-mnist"]),
        (cifar10, ["cifar-10-binary.tar.gz", "test_batch.bin", "dataset.dir=FOLDER"]),
    ],
)
def test_absent_and_offline_ends_in_one_line_that_says_what_to_do(offline, open_source, words):
    with pytest.raises(DataError) as caught:
        open_source()
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_host_that_refuses_or_hangs_does_not_answer(monkeypatch):
    assert not keras_datasets.is_reachable("127.0.0.1:1")
    monkeypatch.setattr(keras_datasets, "PROBE_SECONDS", -0.8)  # Waits 0.2 s.

    def hang(*_, **__):
        time.sleep(1.5)
        raise OSError

    monkeypatch.setattr("urllib.request.urlopen", hang)
    start = time.monotonic()
    assert not keras_datasets.is_reachable("127.0.0.1")
    assert time.monotonic() - start < 1


def test_ranks_take_turns_at_kerass_cache_and_one_downloads(offline, tmp_path, monkeypatch):
    """Four ranks open mnist at once on a host that is online; each load is alone while it runs."""
    cached = tmp_path / "datasets" / "mnist.npz"
    inside, most_inside, downloads = [0], [0], []

    def load_data():
        inside[0] += 1
        most_inside[0] = max(most_inside[0], inside[0])
        if not cached.exists():
            downloads.append(1)
            # In place, as Keras does it: a lock must keep readers away.
            cached.write_bytes(b"half")
            time.sleep(0.2)
            cached.write_bytes(b"whole")
        assert cached.read_bytes() == b"whole"
        inside[0] -= 1
        images, labels = np.zeros((20, 28, 28), np.uint8), np.arange(20) % 10
        return (images, labels), (images, labels)

    monkeypatch.setattr(keras.datasets.mnist, "load_data", load_data)
    monkeypatch.setattr("hvtrain.data.sources.keras_datasets.is_reachable", lambda host: True)
    counts: list[int] = []
    ranks = [
        threading.Thread(
            target=lambda: counts.append(mnist(num_validation=0).num_examples("train"))
        )
        for _ in range(4)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert (counts, len(downloads), most_inside[0]) == ([20] * 4, 1, 1)


def test_what_keras_cannot_read_is_reported_with_the_file_to_remove(offline, tmp_path, monkeypatch):
    def load_data():
        raise EOFError("Compressed file ended")

    monkeypatch.setattr(keras.datasets.mnist, "load_data", load_data)
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "mnist.npz").touch()
    source = mnist()
    assert source.origin == f"Keras's cache ({tmp_path}/datasets)"
    with pytest.raises(
        DataError, match=r"Compressed file ended.*remove .*mnist\.npz and try again"
    ):
        source.num_examples("train")


def test_cifar10_reads_the_binary_version(tmp_path, monkeypatch):
    monkeypatch.setattr(keras_datasets, "CIFAR_IMAGES", 4)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number, name in enumerate(chain(*CIFAR_FILES.values())):
        records = random.integers(0, 256, (4, 3073), np.uint8)
        records[:, 0] = number
        records[:, 1 : 1 + 1024] = 200  # The red plane.
        (folder / name).write_bytes(records.tobytes())
    source = cifar10(dir=str(tmp_path), num_validation=0, standardize="none")
    assert [source.num_examples(split) for split in source.SPLITS] == [20, 0, 4]
    images, labels = next(source.evaluation("test", Topology(), 4).as_numpy_iterator())
    assert (
        labels.tolist() == [5] * 4 and (images[..., 0] == 200).all() and images[..., 1].std() > 50
    )

    (folder / "data_batch_2.bin").write_bytes(bytes(3073))
    with pytest.raises(DataError, match=r"data_batch_2\.bin: 12292 bytes expected, 3073 found"):
        cifar10(dir=str(tmp_path)).num_examples("train")
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(
        DataError, match=r"cifar-10-batches-bin lacks data_batch_3\.bin; unpack the binary version"
    ):
        cifar10(dir=str(tmp_path))
    with pytest.raises(
        DataError,
        match=r"elsewhere lacks data_batch_1\.bin, data_batch_2\.bin, .*unpack the binary",
    ):
        cifar10(dir=str(tmp_path / "elsewhere"))


@pytest.mark.skipif(
    not DEBIAN_FOLDER.is_dir(), reason="needs the Debian package dataset-fashion-mnist"
)
def test_the_debian_package_of_fashion_mnist():
    source = fashion_mnist()
    assert source.origin == f"Debian package dataset-fashion-mnist ({DEBIAN_FOLDER})"
    assert [source.num_examples(split) for split in source.SPLITS] == [55_000, 5_000, 10_000]
    topology = Topology(rank=3, size=50)
    assert source.shard_sizes("train", 50) == [1100] * 50
    images, labels = next(
        source.training(StreamRequest(topology, 1100, 1, 0, 1)).as_numpy_iterator()
    )
    assert images.shape == (1100, 28, 28, 1) and set(labels) == set(range(10))
    # Standardised over all 55,000, this rank's 1,100 are near mean 0 and deviation 1.
    assert abs(images.mean()) < 0.05 and abs(images.std() - 1) < 0.1
