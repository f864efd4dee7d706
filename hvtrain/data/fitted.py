"""Keeps the values that a source fitted to its training data, such as a mean, in the run folder.

The data may change later, but a trained model needs the preprocessing that it was trained with. So
a run that is resumed, or used for predictions, takes the values saved when it first started.
"""

import json
import logging
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from unicodedata import normalize

from hvtrain.data.manifest import refuse_or_warn
from hvtrain.data.source import Source
from hvtrain.errors import StorageError, in_one_line
from hvtrain.system.files import TEMPORARY, read_bytes, write_atomic

log = logging.getLogger(__name__)

FOLDER = "preprocessing"
CLASSES_FILE = "classes.json"


def collect(source: Source) -> dict[str, bytes]:
    """Returns the source's fitted values and class names as file contents, by file name; called on every rank."""
    files = dict(source.fitted())
    # Class names are not fitted, but a model's predictions are indices into them.
    class_names = source.facts().get("class_names")
    if class_names:
        files[CLASSES_FILE] = json.dumps([str(name) for name in class_names]).encode()
    return files


def write(files: Mapping[str, bytes], run: Path) -> None:
    """Writes the files of collect() into the run folder (chief only)."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        write_atomic(folder / name, content)


def read(run: Path) -> dict[str, bytes]:
    """Reads the files that write() saved in a run folder; empty if the run ended before it wrote them.

    Raises:
        StorageError: The files cannot be read.
    """
    folder = run / FOLDER
    if not folder.is_dir():
        return {}
    try:
        # A file left unfinished by a killed run still has its temporary name.
        paths = [path for path in folder.iterdir() if not path.name.startswith(TEMPORARY)]
        return {path.name: read_bytes(path) for path in sorted(paths)}
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be read: {error.strerror or error}; make it readable, and start again"
        ) from error


def apply(source: Source, files: Mapping[str, bytes]) -> None:
    """Makes a new source use the values of an earlier run.

    Raises:
        StorageError: The files are damaged.
    """
    try:
        source.fit_as(files)
    except Exception as error:  # NumPy, Keras and sentencepiece raise many types.
        raise StorageError(
            f"the run's {FOLDER}/ ({', '.join(sorted(files))}) cannot be used for {source.name}: "
            f"{in_one_line(error)}; restore that folder"
        ) from error


def warn_of_unused(source: Source, files: Mapping[str, bytes]) -> None:
    """Warns if a data set other than the run's does not use all of the run's fitted values."""
    unused = sorted(files.keys() - {CLASSES_FILE} - source.fitted().keys())
    if unused:
        log.warning(
            "%s does not use the values fitted to the run's data (%s), so results on it may be meaningless",
            source.name,
            ", ".join(unused),
        )


def check_classes(source: Source, files: Mapping[str, bytes], refuse: bool) -> None:
    """Checks that the source has the run's classes in the same order, since the model predicts their indices.

    Args:
        refuse: If False, warn instead of raising.

    Raises:
        DataError: The classes differ.
    """
    # Without names on both sides there is nothing to compare.
    old_names = json.loads(files.get(CLASSES_FILE, b"null"))
    new_names = [str(name) for name in source.facts().get("class_names") or ()]
    if not old_names or not new_names:
        return
    for index, (old, new) in enumerate(zip_longest(old_names, new_names)):
        # A file system may write é as one character or as two.
        if normalize("NFC", old or "") != normalize("NFC", new or ""):
            refuse_or_warn(
                f"{source.name} has classes other than those the run was trained on: class {index} is "
                f"{new or 'none'}, was {old or 'none'}",
                "restore the run's classes",
                refuse,
            )
            return
