"""The laws of the house, read from the imports: a floor imports only lower floors, one room imports Horovod."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hvtrain"
FLOORS = [
    {
        "__init__",
        "buckets",
        "config",
        "console",
        "cores",
        "costs",
        "elsewhere",
        "errors",
        "help",
        "imports",
        "launching",
        "step_plan",
        "planning",
        "records",
        "run_lock",
        "schedule",
        "settings",
        "topology",
        "watch",
    },
    {"data", "models", "checkpoint", "saving", "footprint", "learning_rate", "step_marks", "versions", "weighting"},
    {"keras"},
    {
        "strategies",
        "callbacks",
        "instantiate",
        "header",
        "prepare",
        "resuming",
        "newest",
        "offers",
        "traveling",
        "sameness",
        "runner",
        "report",
        "verification",
        "diagnosis",
        "export",
        "benchmark",
        "loop",
        "tuning",
        "composition",
        "failing",
        "forecast",
    },
    {"__main__", "bench", "doctor", "door", "horovodrun", "launch", "plan", "spark", "verify"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path):
    """Modules that a file imports, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            if node.module == "hvtrain":
                yield from (f"hvtrain.{alias.name}" for alias in node.names)


def test_every_file_has_a_floor():
    assert {room(path) for path in FILES} <= set(FLOOR)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_floor_imports_only_lower_floors(path):
    for module in imports(path):
        if module.startswith("hvtrain.") and module != "hvtrain.__version__":
            other = module.split(".")[1]
            assert FLOOR.get(other, 0) <= FLOOR[room(path)], f"{path.name} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_one_room_imports_horovod(path):
    """Two doors run Horovod's own launchers, which know no TensorFlow; and we measure ourselves against it."""
    if room(path) not in ("keras", "horovodrun", "spark") and path.parent.name != "by_hand":
        assert not [module for module in imports(path) if module.split(".")[0] in ("horovod", "mpi4py")]


@pytest.mark.parametrize("path", [path for path in FILES if room(path) in FLOORS[0]], ids=lambda path: path.stem)
def test_floor_0_is_the_standard_library(path):
    """And YAML, in which clusters take their files."""
    allowed = {*sys.stdlib_module_names, "hvtrain", *(["yaml"] if room(path) == "launching" else [])}
    assert {module.split(".")[0] for module in imports(path)} <= allowed


def test_the_door_opens_without_tensorflow():
    code = "import sys, hvtrain.__main__; sys.exit(bool({'tensorflow', 'keras', 'hydra', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_stay_readable():
    long = {str(path.relative_to(PACKAGE)): n for path in FILES if (n := len(path.read_text().splitlines())) > 250}
    assert long == {}, "look for the second idea in them"
