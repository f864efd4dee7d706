"""WebDataset's shards: tar files of images with labels or masks, read like folders of files."""

import json
import re
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from hvtrain.data.description import listed
from hvtrain.data.formats.folders import is_junk
from hvtrain.data.formats.image_files import SUFFIXES
from hvtrain.data.formats.tar_files import (
    Member,
    address,
    expand_numbers,
    find_members,
    member_bytes,
)
from hvtrain.data.source import Source, Unreadable
from hvtrain.data.sources.image_folder import Files, LabelledImages, ListedImages, read_members
from hvtrain.data.sources.memory import random_parts
from hvtrain.data.sources.segmentation_folder import SegmentationFolder
from hvtrain.errors import ConfigError, DataError

# Number of shards whose headers are read in parallel, since each read waits for storage.
INDEXED_AT_ONCE = 16

# WebDataset's rule: the path up to the first dot of the file name is the example's key, and the
# rest, as in `seg.png`, is the part's key.
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")


def web_dataset(
    dir: str,
    image_shape: Sequence[int],
    num_classes: int,
    train: str | Sequence[str] = ("train*.tar", "train/*.tar"),
    validation: str | Sequence[str] = ("val*.tar", "val*/*.tar"),
    test: str | Sequence[str] = ("test*.tar", "test*/*.tar"),
    image_key: str | Sequence[str] = ("jpg", "jpeg", "png", "gif", "bmp", "webp", "tif", "tiff"),
    label_key: str = "cls",
    num_validation: int = 0,
    flip: bool = False,
    colors: Sequence[Any] | None = None,
    **images: Any,
) -> Source:
    """Makes a source of images with classes or masks in tar files, such as KEY.jpg beside KEY.cls.

    Pixels are scaled to 0 ... 1. Members are located by the shards' headers and read one by one. So
    examples can be counted, a rank shuffles all of its examples together, and a resumed run reads
    no example again.

    Args:
        dir: The folder of the shards.
        image_shape: [height, width, channels] to which images are resized.
        num_classes: Number of classes, including the background if targets are masks.
        train, validation, test: Shards in dir: paths, globs, and ranges such as train-{0000..0012}.tar.
            Globs for validation and test may match nothing.
        image_key: Endings of images' names, in order: the first that an example has is its image.
        label_key: Ending of labels' names: cls or the like for a number or class name; json.NAME for
            a field of KEY.json; seg.png, or another image, for a mask as in SegmentationFolder.
        num_validation: Number of examples taken out of train at random, with a fixed seed.
        flip: Mirrors half of the training images, and their masks.
        colors: The colors of classes in colored masks; see SegmentationFolder.
        images: class_names (needed if labels are names), shift_pixels, and how images are resized;
            see FileSource.

    Raises:
        ConfigError: If num_validation does not fit the shards.
        DataError: If there is no shard, one is damaged or compressed, or an example lacks a part.
    """
    source_class: type[Sharded] = ShardedImages
    if label_key.lower().endswith(SUFFIXES):
        source_class = ShardedMasks
        images["colors"] = colors
    *names, image_keys = [
        [part] if isinstance(part, str) else part for part in (train, validation, test, image_key)
    ]
    return source_class(
        dir,
        image_shape,
        num_classes,
        names=names,
        image_keys=image_keys,
        label_key=label_key,
        num_validation=num_validation,
        flip=flip,
        **images,
    )


class Sharded(ListedImages):
    """Base class for sources of images in shards: finds each split's shards and their examples.

    Args:
        names: The shards of train, validation and test, each as paths, globs and ranges.
        image_keys, label_key, num_validation: See web_dataset().
        settings, images: Arguments of the next base class.
    """

    name = "webdataset"
    ADVICE = "write or fetch the shard again"
    REMOTE_SUFFIXES = ("",)  # type: ignore[assignment]  # Any file: its members are read one by one.
    read_files = staticmethod(read_members)

    def __init__(
        self,
        *settings: Any,
        names: Sequence[Sequence[str]],
        image_keys: Sequence[str],
        label_key: str,
        num_validation: int,
        **images: Any,
    ) -> None:
        self._names = names
        # Endings of names are compared in lower case.
        self._image_keys = [key.lower() for key in image_keys]
        self._label_key = label_key
        # The ending of labels' names, and the keys that lead to a field in a JSON file.
        suffix, *fields = label_key.split(".")
        if suffix != "json":
            suffix, fields = label_key.lower(), []
        self._label_suffix, self._fields = suffix, fields
        self._num_validation = num_validation
        super().__init__(*settings, **images)
        # Accessed here, so that missing shards are refused when the source is opened.
        self.shards  # noqa: B018

    @abstractmethod
    def target_of(self, shard: Path, member: Member) -> Any:
        """Returns the target that a member holds. Raises DataError if there is none."""

    @cached_property
    def shards(self) -> dict[str, list[Path]]:
        """The shards of each split.

        Raises:
            ConfigError: A name is empty or absolute.
            DataError: A shard is missing, or is in two splits.
        """
        splits: dict[Path, str] = {}
        for split, patterns in zip(self.SPLITS, self._names):
            for name in [name for pattern in patterns for name in expand_numbers(pattern)]:
                if not name or name.startswith("/"):
                    raise ConfigError(
                        f"dataset.{split} has the name {name!r}; give names or patterns relative to dataset.dir"
                    )
                paths = [path for path in sorted(self.folder.glob(name)) if not is_junk(path.name)]
                if not paths and "*" not in name:
                    raise DataError(
                        f"{self.folder / name} does not exist; fetch it, or change dataset.{split}"
                    )
                for path in paths:
                    # Two patterns of a split may name the same shard.
                    if splits.setdefault(path, split) != split:
                        raise DataError(
                            f"{path} is in both dataset.{splits[path]} and dataset.{split}; remove it from one"
                        )

        shards = defaultdict(list)
        for path, split in splits.items():
            shards[split].append(path)
        if "train" not in shards:
            raise DataError(
                f"{self.folder} has no {listed(self._names[0])}; set dataset.train to its tar files"
            )
        return shards

    def paths(self, split: str) -> list[str]:
        # Examples that were taken out of train are in its shards.
        return [str(path) for path in self.shards.get(split, self.shards["train"])]

    def list_examples(self, refuse: Callable[[Unreadable], None]) -> dict[str, Files]:
        """Lists the examples of each split.

        Args:
            refuse: Called with each item that cannot be used; may raise an error.

        Raises:
            ConfigError: num_validation does not fit the shards.
            DataError: The shards of train hold no example.
        """
        examples: dict[str, Files] = {}
        with ThreadPoolExecutor(INDEXED_AT_ONCE) as pool:
            for split, shards in self.shards.items():
                examples[split] = []
                for rows, problems in pool.map(self._examples_of, shards):
                    examples[split] += rows
                    for problem in problems:
                        refuse(problem)

        rows = examples["train"]
        if not rows:
            raise DataError(
                f"{self.folder}: the shards of train hold no example; check dataset.image_key and dataset.label_key"
            )
        if not 0 <= self._num_validation < len(rows) or (
            self._num_validation and "validation" in examples
        ):
            raise ConfigError(
                f"dataset.num_validation={self._num_validation} is not possible; give 0 ... {len(rows) - 1}, but "
                "only 0 if validation has shards of its own"
            )
        if self._num_validation:
            validation, train = random_parts(self._num_validation, len(rows) - self._num_validation)
            examples["validation"] = [rows[index] for index in validation]
            examples["train"] = [rows[index] for index in train]
        return examples

    def _examples_of(self, shard: Path) -> tuple[Files, list[Unreadable]]:
        """Lists the examples of a shard, and the items in it that cannot be used."""
        members, defect = find_members(shard)
        problems = [Unreadable(str(shard), defect, None)] if defect else []
        keys: dict[str, dict[str, Member]] = {}
        for member in members:
            match = _NAME.fullmatch(member["name"])
            if match:
                # The last of several members with the same name counts, as if they were unpacked.
                keys.setdefault(match[1], {})[match[2].lower()] = member

        rows = []
        suffix = self._label_suffix
        for key, parts in keys.items():
            images = [parts[image_key] for image_key in self._image_keys if image_key in parts]
            try:
                if images and suffix in parts:
                    rows.append((address(shard, images[0]), self.target_of(shard, parts[suffix])))
                elif images or suffix in parts:
                    raise DataError(
                        f"has no {suffix if images else 'image'} (it has {listed(sorted(parts))})"
                    )
            except DataError as error:
                problems.append(Unreadable(f"{shard}, {key}", str(error)))
        return rows, problems


class ShardedImages(Sharded, LabelledImages):
    """Images and classes in shards. See web_dataset."""

    @cached_property
    def _class_indices(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.class_names or ())}

    @cached_property
    def _has_numbers_as_names(self) -> bool:
        """True if a label could be both a name, such as a grade, and an index: then none is read as an index."""
        return any(
            name.isdecimal() and int(name) < self.num_classes for name in self._class_indices
        )

    @cached_property
    def _files(self) -> dict[str, Files]:  # type: ignore[override]
        """The examples of each split, listed on first use, since on_error is set after the source is opened."""
        return self.list_examples(self.refuse)

    def target_of(self, shard: Path, member: Member) -> int:
        content = member["text"] or member_bytes(address(shard, member)) or b""
        value: Any = content.decode(errors="replace")
        label = -1
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            if self._fields:
                value = json.loads(content)
            for name in self._fields:
                value = value[name]
            text = str(value).strip()
            is_name = self._has_numbers_as_names or text in self._class_indices
            label = self._class_indices[text] if is_name else int(text)
        if not 0 <= label < self.num_classes:
            indices = f"0 ... {self.num_classes - 1} is needed, or one of dataset.class_names"
            names = "one of dataset.class_names is needed"
            raise DataError(
                f"{self._label_key} is {str(value)[:40]!r}; {names if self._has_numbers_as_names else indices}"
            )
        return label


class ShardedMasks(Sharded, SegmentationFolder):
    """Images and masks in shards. See web_dataset."""

    def list_pairs(self) -> tuple[dict[str, Files], list[str]]:
        # Pairs are listed before on_error is set, so none can be left out.
        def refuse(item):
            raise DataError(f"{item.location}: {item.problem}; {self.ADVICE}")

        return self.list_examples(refuse), []

    def target_of(self, shard: Path, member: Member) -> str:
        return address(shard, member)
