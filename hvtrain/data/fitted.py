"""What a source fitted to its training data, kept in the run folder.

Data change, and a trained model does not: whoever resumes or uses a run preprocesses as it did when it began.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from hvtrain.core.files import TEMPORARY, read_bytes, write_atomic
from hvtrain.data.manifest import refuse_or_warn
from hvtrain.data.source import Source
from hvtrain.errors import DataError, StorageError, in_one_line

log = logging.getLogger(__name__)

FOLDER = "preprocessing"
CLASSES_FILE = "classes.json"


def collect(source: Source) -> dict[str, bytes]:
    """What the source fitted, and the names of its classes, as files by name (every rank, before the first stream)."""
    files = dict(source.fitted())
    if names := source.facts().get("class_names"):
        files[CLASSES_FILE] = json.dumps([str(name) for name in names]).encode()
    return files


def keep(files: Mapping[str, bytes], run: Path) -> None:
    """Writes what collect() found into the run folder (chief only)."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        write_atomic(folder / name, content)


def read(run: Path) -> dict[str, bytes]:
    """What keep() wrote; empty for a run of an older version. Raises StorageError if it cannot be read."""
    folder = run / FOLDER
    try:
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        return {path.name: read_bytes(path) for path in paths if not path.name.startswith(TEMPORARY)}
    except OSError as error:
        raise StorageError(f"{folder} cannot be read: {error.strerror or error}; fix that, and start again") from error


def give(source: Source, files: Mapping[str, bytes]) -> None:
    """Has a new source use them. Raises StorageError if they are damaged."""
    try:
        source.fit_as(files)
    except Exception as error:  # NumPy, Keras and sentencepiece each raise errors of their own.
        names = ", ".join(sorted(files))
        raise StorageError(
            f"the run's {FOLDER}/ ({names}) cannot be used for {source.name}: {in_one_line(error)}; restore that folder"
        ) from error


def warn_of_unused(source: Source, files: Mapping[str, bytes]) -> None:
    """Says so if the source, another data set than the run's, preprocesses in a way of its own."""
    if unused := sorted(files.keys() - {CLASSES_FILE} - source.fitted().keys()):
        log.warning(
            "%s is preprocessed in its own way, and the run's data were not (%s): its results may mean little",
            source.name,
            ", ".join(unused),
        )


def check_classes(source: Source, files: Mapping[str, bytes], refuse: bool) -> None:
    """Raises DataError (or warns) if the source has other classes than the run: their numbers would be mistaken."""
    was = json.loads(files.get(CLASSES_FILE, b"null"))
    now = [str(name) for name in source.facts().get("class_names") or ()]
    if was and now and was != now:
        index = next((i for i, (old, new) in enumerate(zip(was, now)) if old != new), min(len(was), len(now)))
        old, new = ((names[index] if index < len(names) else "none") for names in (was, now))
        refuse_or_warn(
            f"{source.name} has other classes than the run was trained on: class {index} is {new}, was {old}",
            "restore them",
            DataError if refuse else None,
        )
