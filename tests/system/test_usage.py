"""Memory of this process, and what control groups leave of it."""

from pathlib import Path

import numpy as np
import psutil

from hvtrain.system import resources

GIB = 2**30


def group(folder, limit, used, cached, names):
    folder.mkdir(parents=True, exist_ok=True)
    limit_file, usage_file, prefix = names
    (folder / limit_file).write_text(str(limit))
    (folder / usage_file).write_text(str(used))
    files = f"{prefix}active_file {cached // 4}\n{prefix}inactive_file {cached - cached // 4}\n"
    (folder / "memory.stat").write_text(f"anon 5\n{files}")


def test_a_peak_can_begin_anew():
    held = np.ones(300 * 2**20 // 8)
    assert resources.peak_bytes() >= held.nbytes
    del held
    before = resources.peak_bytes()
    resources.reset_peak()
    assert resources.resident_bytes() * 0.9 < resources.peak_bytes() <= before


def test_the_host_limits_what_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "_CGROUPS", tmp_path)
    assert abs(resources.free_bytes() - psutil.virtual_memory().available) < GIB


def test_so_does_the_group_of_this_process_and_any_around_it(tmp_path, monkeypatch):
    read, lines = Path.read_text, "0::/job/step\n"
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, *a: lines if str(path) == "/proc/self/cgroup" else read(path, *a),
    )
    monkeypatch.setattr(resources, "_CGROUPS", tmp_path)
    group(tmp_path / "job", 5_000_000, 4_000_000, 200_000, resources._V2)
    group(tmp_path / "job/step", "max", 1, 0, resources._V2)
    assert resources.free_bytes() == 1_200_000
    lines = "0::/\n4:cpu,memory:/job\n"
    group(tmp_path / "memory/job", 7_000_000, 6_999_000, 0, resources._V1)
    assert resources.free_bytes() == 1000
    group(tmp_path / "memory/job", 7_000_000, 7_999_000, 0, resources._V1)
    assert resources.free_bytes() == 0
