"""`python -m hvtrain migrate`: shows how a script for Horovod on Keras 2 changes for Keras 3, or writes it."""

import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hvtrain.core.records import TEMPORARY
from hvtrain.errors import ConfigError, StorageError
from hvtrain.system.command import Parser

if TYPE_CHECKING:
    from hvtrain.migrate.rewriting import Rewritten

COLORS = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m"}
EPILOG = """\
exit codes:
  0   nothing is left to decide
  1   the reported lines are left to you
  2   a file is missing or is not Python

examples:
  python -m hvtrain migrate train.py            show the changes
  python -m hvtrain migrate train.py --write    write them
  python -m hvtrain migrate src/ --write        all Python files of a folder

The script keeps its layout and comments. docs/migration.md lists what changes.
"""


def main() -> int:
    """Migrates the files of the command line; all of them are read before any is written."""
    parser = Parser(
        "python -m hvtrain migrate",
        usage="%(prog)s [--write] FILE|FOLDER ...",
        description="""\
Rewrites scripts for Horovod on Keras 2 or tf.keras to hvtrain.keras on Keras 3, and reports each line that it cannot
decide. Shows the changes as a diff, and writes nothing without --write.""",
        epilog=EPILOG,
    )
    what = "Python files, and folders of them; hidden folders and environments of Python in these are left alone"
    parser.add_argument("places", nargs="+", metavar="FILE|FOLDER", help=what)
    parser.add_argument("--write", action="store_true", help="write the files, without a copy of the old ones")
    options = parser.parse_args()
    if not find_spec("libcst"):
        raise ConfigError(
            "this command needs libcst, which is not installed; install scripts/lock/migrate.txt, or libcst"
        )
    from hvtrain.migrate.rewriting import migrate

    texts = {file: _read(file) for place in options.places for file in _files(Path(place))}
    found = {file: migrate(text, str(file)) for file, text in texts.items()}
    for file, rewritten in found.items():
        if options.write and rewritten.text != rewritten.old:
            _write(file, rewritten.text)
        _report(file, rewritten, options.write)
    return 1 if any(rewritten.undecided for rewritten in found.values()) else 0


def _files(place: Path) -> Iterator[Path]:
    if place.is_dir():
        files = sorted(file for file in place.rglob("*.py") if not _is_of_others(file.relative_to(place), place))
        if not files:
            raise ConfigError(f"{place} holds no Python file; name a folder of scripts")
        yield from files
    elif place.exists():
        yield place
    else:
        raise ConfigError(f"{place} does not exist; name a Python file or a folder of them")


def _is_of_others(file: Path, place: Path) -> bool:
    """True for what tools and packages keep in a project: hidden folders, and environments of Python."""
    folders = file.parent.parts
    is_kept_by_tools = any(name.startswith(".") or name in ("site-packages", "node_modules") for name in folders)
    return is_kept_by_tools or any((place / folder / "pyvenv.cfg").exists() for folder in file.parents)


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not Python in UTF-8: {error.reason}; name a Python file") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; make it readable") from error


def _write(file: Path, text: str) -> None:
    """Replaces a script at once, with the mode that it had. A link stays one."""
    target = file.resolve()
    temporary = target.with_name(f"{TEMPORARY}{target.name}")
    try:
        temporary.write_bytes(text.encode())
        shutil.copymode(target, temporary)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(f"{file} cannot be written: {error.strerror}; make it writable") from error


def _report(file: Path, rewritten: "Rewritten", written: bool) -> None:
    if rewritten.text == rewritten.old:
        print(f"{file}: nothing to change")
    elif written:
        print(f"{file}: written")
    else:
        colored = sys.stdout.isatty()
        for line in rewritten.diff(str(file)):
            color = COLORS.get(line[0], "") if colored else ""
            end = "\x1b[0m" if color else ""
            print(f"{color}{line.rstrip()}{end}")
    for number, text in rewritten.undecided if written else rewritten.undecided_in_old():
        print(f"{file}: line {number}: {text}")
