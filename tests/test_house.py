"""The laws of the house, held against the table of rooms in CONTRIBUTING.md and the imports of every file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hvtrain"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
ROOMS = re.findall(
    r"^\| `([\w/]+)` \|", (PACKAGE.parent / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE
)
NO_TENSORFLOW = (
    *(
        "errors",
        "config/",
        "core/",
        "watchdog/",
        "launch/",
        "migrate/",
        "report/",
        "__main__",
        "spark",
    ),
)
# Names that a reader has to resolve in his head each time.
VAGUE = {"found", "one", "came", "said", "told", "giver"}
# Files under 60 lines that are no idea of another file: why.
SHORT = {
    "__main__.py": "the command line",
    "core/buckets.py": "keras/ and plan/ use it, and core/ has no closer idea",
    "launch/horovodrun.py": "the program horovodrun",
    "system/storage/runs.py": "commands use it, and runs do not",
    "system/text.py": "numbers for people, which every room has",
}
USE_HOROVOD = ("keras/", "launch/", "plan/", "spark")


def room(location: str) -> str:
    """The room of a file or a folder below hvtrain/: the innermost one of the table."""
    return max(
        (room for room in ROOMS if f"{location}/".startswith(f"{room.rstrip('/')}/")),
        key=len,
        default=location,
    )


def room_of(path: Path) -> str:
    return room(path.relative_to(PACKAGE).with_suffix("").as_posix())


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, those inside functions too; modules and the names taken from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top_level(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def test_the_table_names_every_room_on_disk() -> None:
    places = {path.relative_to(PACKAGE).parts[0] for path in FILES}
    on_disk = {
        f"{location}/" if (PACKAGE / location).is_dir() else location.removesuffix(".py")
        for location in places
    }
    assert on_disk == {room for room in ROOMS if "/" not in room.rstrip("/")}
    assert all((PACKAGE / room).is_dir() for room in ROOMS if room.endswith("/"))
    assert len(set(ROOMS)) == len(ROOMS) > 20


def test_a_room_imports_only_rooms_above_it_in_the_table() -> None:
    wrong = []
    for path in FILES:
        mine = room_of(path)
        for name in imports(path):
            if not name.startswith("hvtrain."):
                continue
            other = room(name.removeprefix("hvtrain.").replace(".", "/"))
            assert other in ROOMS, f"{path}: {name} is in no room"
            # The face of a room hands on what its inner rooms have.
            if path.name == "__init__.py" and other.startswith(mine):
                continue
            if ROOMS.index(other) > ROOMS.index(mine):
                wrong.append(f"{path}: {mine} imports {name}, of a room below it")
    assert wrong == []


def test_who_imports_horovod_and_tensorflow() -> None:
    for path in FILES:
        mine, imported = room_of(path), top_level(path)
        assert mine in USE_HOROVOD or not {"horovod", "mpi4py"} & imported, path
        assert mine not in NO_TENSORFLOW or not {"tensorflow", "keras"} & imported, path
        if mine in ("core/", "watchdog/"):
            more = {"psutil"} if mine == "watchdog/" else set()
            assert imported <= {*sys.stdlib_module_names, "hvtrain", *more}, (
                f"{path}: only the standard library"
            )


def test_commands_and_pure_rooms_start_without_tensorflow() -> None:
    code = (
        "import sys, pkgutil, importlib, hvtrain.__main__, hvtrain.config, hvtrain.core\n"
        "light = {'tensorflow', 'keras', 'hydra', 'numpy'} & set(sys.modules)\n"
        "for package in (hvtrain.config, hvtrain.core):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "sys.exit(str({*light, *{'tensorflow', 'keras'} & set(sys.modules)} or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "", done.stderr


def test_files_stay_readable() -> None:
    long = {
        str(path.relative_to(PACKAGE)): n
        for path in FILES
        if (n := len(path.read_text().splitlines())) > 400
    }
    assert long == {}, "look for the second idea in them"


def test_short_files_have_a_reason() -> None:
    short = {
        str(path.relative_to(PACKAGE)) for path in FILES if len(path.read_text().splitlines()) < 60
    }
    unexpected = {name for name in short if not name.endswith("__init__.py")} - {*SHORT}
    assert unexpected == set(), (
        "fold them into the file of their idea, or say in SHORT why they stand alone"
    )


def test_names_say_something() -> None:
    vague = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        for name in [
            node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ""
        ]
        if name in VAGUE
    ]
    assert vague == [], "name the thing: records, matches, row, message"
