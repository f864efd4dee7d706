"""Finds the splits of a data folder, skips the junk of operating systems, and reports unused entries.

Also looks up the classes of files in a label file, for folders without class folders.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from unicodedata import normalize

from hvtrain.data.description import listed
from hvtrain.data.manifest import check_names, user_path
from hvtrain.errors import DataError, first_line

# Accepted names of each split. If a folder has several for one split,
# the first in this order is read.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test", "testing"),
}
# Entries that Windows and macOS leave behind in folders, in lower case.
JUNK = {"thumbs.db", "desktop.ini", "__macosx"}

# A file's name begins with its split. No letter may follow an
# abbreviation: value.parquet is not val.
_BEGIN = re.compile(r"train|validation|test|(?:valid|val|dev)(?![a-z])")


def visible(folder: Path) -> list[Path]:
    """Lists the entries of a folder, sorted, without hidden ones and JUNK; empty if there is no such folder.

    Raises DataError for a name that is not UTF-8, as an archive made on Windows may contain.
    """
    if not folder.is_dir():
        return []
    # Hidden entries are, for example, .ipynb_checkpoints, and ._NAME, which macOS writes beside
    # each file. Sorted because all ranks need the same order, and file systems guarantee none.
    paths = [path for path in sorted(folder.iterdir()) if not is_junk(path.name)]
    check_names(paths)
    return paths


def is_bookkeeping(name: str) -> bool:
    """True for a name with which Spark marks bookkeeping and unfinished files, such as _SUCCESS and .part.crc."""
    return name[0] in "._"


def files_below(folder: Path, skips: Callable[[str], bool] = is_bookkeeping) -> list[Path]:
    """Lists the files in a folder and its subfolders, sorted, following links; empty if there is no folder.

    Args:
        folder: The folder.
        skips: Returns True for the name of a file or folder to leave out.

    Raises:
        DataError: A link leads to a folder that contains it, or a folder is a Delta table.
    """

    def walk(current: Path, parents: tuple[Path, ...]) -> Iterator[Path]:
        real = current.resolve()
        if real in parents:
            raise DataError(f"{current} is a link to {real}, which contains it; remove the link")
        for path in sorted(current.iterdir()):
            if path.name == "_delta_log":
                raise DataError(
                    f"{current} is a Delta table, whose files may hold rows that were deleted or replaced; export it "
                    "as Parquet files, or name these files if rows were only added: *.parquet"
                )
            if skips(path.name):
                continue
            if path.is_dir():
                yield from walk(path, (*parents, real))
            elif path.is_file():
                yield path

    return list(walk(folder, ())) if folder.is_dir() else []


def is_junk(name: str) -> bool:
    """True for the name of a hidden entry, or one of JUNK."""
    return name.startswith(".") or name.lower() in JUNK


def split_entries(names: Iterable[str]) -> dict[str, str]:
    """Chooses the name that stands for each split, among names of folders or of a library's splits.

    >>> split_entries(["Train", "val", "valid", "unlabelled"])
    {'train': 'Train', 'validation': 'val'}
    """
    # Lower-case names take precedence.
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


def split_of(path: PurePath) -> str:
    """Returns the name of a split with which a part of the path begins, such as val; empty if there is none.

    >>> split_of(PurePath("v1/test_set.csv")), split_of(PurePath("testing.csv")), split_of(PurePath("testimonials.csv"))
    ('test', 'test', '')
    """
    for part in path.parts:
        match = re.match(rf"({_BEGIN.pattern})(ing|s)?(?![a-z])", part.lower())
        if match:
            return match[1]
    return ""


def find_split_files(
    folder: Path, files_of: Callable[[Path], list[Path]]
) -> tuple[dict[str, list[Path]], list[str]]:
    """Finds the files of each split: those named FOLDER/SPLIT*, and those in folders of such names.

    Args:
        files_of: Lists the data files in a folder, sorted; for a data file, only the file itself.

    Returns:
        The files by split, and the result of unused_warnings() about entries of no split.
    """
    files = {path: files_of(path) for path in visible(folder)}
    entries = [path for path in files if files[path]]
    by_name = defaultdict(list)
    for path in entries:
        by_name[split_of(PurePath(path.name))].append(path)

    splits = {}
    used: list[Path] = []
    for split, aliases in SPLIT_NAMES.items():
        paths = next((by_name[alias] for alias in aliases if alias in by_name), [])
        splits[split] = [file for path in paths for file in files[path]]
        used += paths
    return splits, unused_warnings(entries, used)


def unused_warnings(paths: Iterable[Path], used: Iterable[Path]) -> list[str]:
    """Returns one warning, in a list, that names the entries of no split; empty if all are used."""
    names = [path.name for path in sorted(set(paths) - set(used))]
    if not names:
        return []
    aliases = "; ".join(map(", ".join, SPLIT_NAMES.values()))
    return [
        f"left out, because they are in no split: {listed(names)} (each split is read from the first of: {aliases})"
    ]


def look_up_labels(
    paths: Sequence[Path], labels: Mapping[str, int], class_file: str, number_file: str | None
) -> list[tuple[str, int]]:
    """Looks up the labels of files in a folder without class folders, such as ImageNet's validation images.

    Args:
        paths: Paths of the files, sorted.
        labels: The label of each class, by class name.
        class_file: A text or CSV file, with lines of `FILE CLASS`, or with one class per line for the
            files in the order of their names. Anything else on a line is ignored.
        number_file: A similar file with lines of `NUMBER CLASS`, if class_file has numbers instead of classes.

    Returns:
        The paths with their labels.

    Raises:
        DataError: A file has no known class, or class_file has too few or too many lines, or no names
            although it is unclear whether 10.jpg comes before 2.jpg.
    """
    rows = _rows(class_file)
    texts = [row[0] for row in rows]
    if rows and len(rows[-1]) > 1:
        # Some lists give paths with folders, others names without suffixes.
        # In ImageNet's own CSV, bounding boxes follow the class.
        by_name = defaultdict(set)
        for row in rows:
            text = row[-1] if row[-1] in labels else row[-1].partition(" ")[0]
            by_name[PurePath(row[0]).name].add(text)
        # A file that is not in the list gets an empty text, and one that is listed with several
        # classes gets them all, as in "cat or dog". Neither text names a class.
        texts = []
        for path in paths:
            name = PurePath(normalize("NFC", path.name))
            texts.append(" or ".join(sorted(by_name[name.name] or by_name[name.stem])))
    elif list(paths) != sorted(paths, key=_number_key):
        raise DataError(
            f"{class_file} has no file names, and the numbers in the file names of {paths[0].parent} lack leading "
            "zeros, so that 10 may come before or after 2; write lines of FILE CLASS"
        )
    if len(texts) != len(paths):
        raise DataError(
            f"the number of lines in {class_file} ({len(texts):,}) is not the number of images ({len(paths):,}); give "
            "one line for each image, or lines of FILE CLASS"
        )

    by_number = {row[0]: row[-1] for row in _rows(number_file)} if number_file else {}
    texts = [by_number.get(text, text) for text in texts]
    wrong = [
        f"{path.name} ({text or 'no class'})"
        for path, text in zip(paths, texts)
        if text not in labels
    ]
    if wrong:
        raise DataError(
            f"{class_file} gives {len(wrong):,} image(s) a class that has no folder in train/: {listed(wrong)}; write "
            "the folders' names, or set dataset.class_numbers to a file with lines of NUMBER CLASS (docs/imagenet.md)"
        )
    return [(str(path), labels[text]) for path, text in zip(paths, texts)]


def read_text(path: Path) -> str:
    """Reads a text file. Raises DataError if it cannot be read, or is not UTF-8."""
    try:
        # Windows programs may write a byte order mark first; utf-8-sig drops it.
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read: {first_line(error)}; give a text file in UTF-8"
        ) from error


def _number_key(path: Path) -> str:
    """Returns a key that sorts 2.jpg before 10.jpg."""
    return re.sub(r"\d+", lambda match: match[0].zfill(20), path.name)


def _rows(path: str) -> list[list[str]]:
    """Reads the first two fields of each line, split at commas if every line has one, else at white space or commas."""
    # Class names are in this form too, whichever their folders have.
    text = normalize("NFC", read_text(user_path(path)))
    lines = [line for line in text.splitlines() if line.strip()]
    has_commas = all("," in line for line in lines)
    rows = [line.replace(",", " ").split() for line in lines]
    if has_commas:
        try:
            rows = [next(csv.reader([line], skipinitialspace=True)) for line in lines]
        except csv.Error as error:
            raise DataError(f"{path} is not a CSV file: {error}; write it again") from error
    return [[field.strip() for field in row[:2]] for row in rows]
