"""Folders as people have them: the names of splits, files that systems leave there, and what nobody reads.

Also the classes of a folder's files, where a file of labels has them instead of folders.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath

from hvtrain.data.description import listed
from hvtrain.data.manifest import user_path
from hvtrain.errors import DataError

SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test", "testing"),
}
"""Names of each split. If there are several of one split, the first in this order is read."""
JUNK = {"thumbs.db", "desktop.ini", "__macosx"}
"""What Windows and macOS leave beside files, in lower case."""

# A file's name begins with its split. The short names need an end: value.parquet is not val.
_BEGIN = re.compile(r"train|validation|test|(?:valid|val|dev)(?![a-z])")


def visible(folder: Path) -> list[Path]:
    """The sorted entries of a folder, without hidden ones and JUNK; none if there is no such folder."""
    if not folder.is_dir():
        return []
    # Hidden are .ipynb_checkpoints and the ._NAME that macOS writes beside each file. Sorted, since
    # file systems list a folder in any order, and all ranks need the same one.
    return [path for path in sorted(folder.iterdir()) if not is_junk(path.name)]


def is_junk(name: str) -> bool:
    return name.startswith(".") or name.lower() in JUNK


def split_entries(names: Iterable[str]) -> dict[str, str]:
    """Chooses, among names of folders or of a library's splits, that of each split.

    >>> split_entries(["Train", "val", "valid", "unlabelled"])
    {'train': 'Train', 'validation': 'val'}
    """
    # Exact names come before those in other cases.
    ordered = sorted(names, key=lambda name: (not name.islower(), name))
    entries = {}
    for split, aliases in SPLIT_NAMES.items():
        matches = [name for alias in aliases for name in ordered if name.lower() == alias]
        if matches:
            entries[split] = matches[0]
    return entries


def split_folders(folder: Path) -> dict[str, Path]:
    """Finds the folder of each split."""
    entries = split_entries(path.name for path in visible(folder) if path.is_dir())
    return {split: folder / name for split, name in entries.items()}


def split_files(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Deals files, or folders of files, to the splits that their names begin with, sorted."""
    by_name: dict[str, list[Path]] = {}
    for path in sorted(paths):
        match = _BEGIN.match(path.name.lower())
        if match:
            by_name.setdefault(match[0], []).append(path)

    splits: dict[str, list[Path]] = {}
    for split, aliases in SPLIT_NAMES.items():
        splits[split] = next((by_name[alias] for alias in aliases if alias in by_name), [])
    return splits


def left_out(paths: Iterable[Path], used: Iterable[Path]) -> list[str]:
    """A warning that names the files and folders that are in no split, if there are any."""
    names = [path.name for path in sorted(set(paths) - set(used))]
    if not names:
        return []
    aliases = ", ".join(alias for names_of_split in SPLIT_NAMES.values() for alias in names_of_split)
    return [f"left out, because no split has such a name: {listed(names)} (splits are {aliases})"]


def with_labels(
    paths: Sequence[Path],
    labels: Mapping[str, int],
    class_file: str,
    number_file: str | None,
) -> list[tuple[str, int]]:
    """Finds the labels of files in a folder without class folders, as ImageNet's validation comes.

    Args:
        paths: of the files, sorted.
        labels: of the classes.
        class_file: a text or CSV file. It has lines of `FILE CLASS`, or a class for each of the
            files in the order of their names. What else is on a line is left out.
        number_file: such a file with lines of `NUMBER CLASS`, if class_file has numbers instead of
            classes.

    Returns:
        The paths with their labels.

    Raises:
        DataError: a file has no class that is known.
    """
    rows = _rows(class_file)
    texts = [row[0] for row in rows]
    if rows and len(rows[-1]) > 1:
        # Some lists have folders before the names, others names without their endings.
        by_name = {PurePath(row[0]).name: row[1] for row in rows}
        texts = [by_name.get(path.name, by_name.get(path.stem, "none")) for path in paths]
    if len(texts) != len(paths):
        raise DataError(
            f"{class_file} has {len(texts):,} lines for {len(paths):,} images; give one each, or lines of FILE CLASS"
        )

    by_number = {row[0]: row[-1] for row in _rows(number_file)} if number_file else {}
    texts = [by_number.get(text, text) for text in texts]
    wrong = [f"{path.name} ({text})" for path, text in zip(paths, texts) if text not in labels]
    if wrong:
        raise DataError(
            f"{class_file} gives {len(wrong):,} images no class that train/ has: {listed(wrong)}; name its folders, or "
            "set dataset.class_numbers to a file with lines of NUMBER CLASS (docs/imagenet.md)"
        )
    return [(str(path), labels[text]) for path, text in zip(paths, texts)]


def _rows(path: str) -> list[list[str]]:
    """The first two fields of each line, between which are commas or blanks."""
    lines = user_path(path).read_text().splitlines()
    return [re.split(r"[,\s]+", line.strip())[:2] for line in lines if line.strip()]
