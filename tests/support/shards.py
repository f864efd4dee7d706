"""Shards as WebDataset's writers and tar make them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tensorflow as tf

IMAGE_KEYS = ["jpg", "png"]


def write_shard(
    path: Path, members: Iterable[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT
) -> Path:
    """A tar file of members, in their order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in members:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
    return path


def members_of(
    images: np.ndarray, labels: Iterable[object], numbers: Iterable[int]
) -> list[tuple[str, bytes]]:
    """NUMBER.cls and NUMBER.png of some examples."""
    labels = list(labels)
    members = []
    for number in numbers:
        members.append((f"{number:04d}.cls", str(labels[number]).encode()))
        members.append((f"{number:04d}.png", tf.io.encode_png(images[number]).numpy()))
    return members


def write_shards(
    folder: Path, split: str, images: np.ndarray, labels: np.ndarray, num_shards: int
) -> list[Path]:
    """SPLIT-NUMBER.tar, in the order in which the same images are in class folders."""
    order = sorted(range(len(images)), key=lambda number: (labels[number], number))
    parts = np.array_split(order, num_shards)
    return [
        write_shard(folder / f"{split}-{number:06d}.tar", members_of(images, labels, part))
        for number, part in enumerate(parts)
    ]
