"""Folders as people have them: the names of splits, files that systems leave there, and what nobody reads."""

import re
from collections.abc import Iterable
from pathlib import Path

from hvtrain.data.description import listed

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
