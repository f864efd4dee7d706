"""`python -m hvtrain migrate`: shows how scripts for Horovod on Keras 2 change for Keras 3, or rewrites them."""

import difflib
import shutil
from importlib.util import find_spec
from pathlib import Path

from hvtrain.errors import ConfigError
from hvtrain.system.command import Parser
from hvtrain.system.files import TEMPORARY, write_atomic


def main() -> int:
    """Migrates the files and folders given on the command line, and returns the exit code."""
    parser = Parser(
        "python -m hvtrain migrate",
        usage="%(prog)s [--write] FILE|FOLDER ...",
        description="""\
Rewrites scripts for Horovod on Keras 2 or tf.keras to hvtrain.keras on Keras 3, and reports each line that it leaves
to you. Without --write, shows the changes as a diff and writes nothing.""",
        epilog="""\
exit codes:
  0   nothing is left to decide
  1   some lines are left to you, or files in a folder are not Python 3
  2   a file is missing or is not Python

examples:
  python -m hvtrain migrate train.py            show the changes
  python -m hvtrain migrate train.py --write    write them
  python -m hvtrain migrate src/ --write        all Python files of a folder

The script keeps its layout and comments. docs/migration.md lists what changes.
""",
    )

    parser.add_argument(
        "paths",
        nargs="+",
        metavar="FILE|FOLDER",
        help="Python files, or folders of them; hidden folders and Python environments inside are skipped",
    )
    parser.add_argument(
        "--write", action="store_true", help="write the files, without a copy of the old ones"
    )
    options = parser.parse_args()
    if not find_spec("libcst"):
        raise ConfigError(
            "this command needs libcst, which is not installed; run pip install libcst"
        )

    # libcst is optional, so it is imported after the check.
    from hvtrain.migrate.rewriting import migrate

    # All files are read before any is written, so an error leaves all of them unchanged.
    scripts = {}
    failures = []
    for path in map(Path, options.paths):
        for file in _python_files(path):
            try:
                scripts[file] = migrate(_read(file), str(file))
            except ConfigError as error:
                # Only a folder may hold unsuitable files, such as files in Python 2.
                if file == path:
                    raise
                failures.append(error)

    if options.write:
        changed = {file: script for file, script in scripts.items() if script.text != script.old}
        # Resolved, so that a link stays and its target is rewritten.
        _write({file.resolve(): script.text for file, script in changed.items()})
    for file, script in scripts.items():
        _report(file, script, options.write)
    for failure in failures:
        print(failure)

    return int(bool(failures) or any(script.undecided for script in scripts.values()))


def _python_files(path: Path) -> list[Path]:
    if not path.exists():
        raise ConfigError(f"{path} does not exist; name a Python file or a folder of them")
    if not path.is_dir():
        return [path]

    files = sorted(
        file for file in path.rglob("*.py") if not _belongs_to_tools(file.relative_to(path), path)
    )
    if not files:
        raise ConfigError(f"{path} holds no Python file; name a folder of scripts")
    return files


def _belongs_to_tools(file: Path, folder: Path) -> bool:
    """True for a file in a hidden folder, a Python environment or node_modules, which is not the user's own code."""
    return any(
        parent.name.startswith(".")
        or parent.name in ("site-packages", "node_modules")
        or (folder / parent / "pyvenv.cfg").exists()
        for parent in file.parents
    )


def _read(file: Path) -> str:
    try:
        # utf-8-sig drops the byte order mark with which some editors begin a file.
        return file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} cannot be read as UTF-8 text: {error}; name a Python file in UTF-8"
        ) from error


def _write(texts: dict[Path, str]) -> None:
    """Writes all files, or none if one cannot be written: a half-migrated folder does not run."""
    temporaries = {}
    try:
        for file, text in texts.items():
            temporary = file.with_name(f"{TEMPORARY}{file.name}")
            write_atomic(temporary, text)
            temporaries[temporary] = file
            shutil.copymode(file, temporary)
        for temporary, file in temporaries.items():
            temporary.replace(file)
    finally:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)


def _report(file: Path, script, is_written: bool) -> None:
    """Prints the changes and the lines left to decide, numbered as in the file that is now on disk."""
    if script.text == script.old:
        print(f"{file}: nothing to change")
    elif is_written:
        print(f"{file}: written")
    else:
        old = script.old.splitlines()
        new = script.text.splitlines()
        for line in difflib.unified_diff(old, new, str(file), f"{file} (migrated)"):
            print(line.rstrip())

    for number, text in script.undecided if is_written else script.undecided_in_old():
        print(f"{file}: line {number}: {text}")
