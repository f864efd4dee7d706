"""The state of the user's git checkout."""

import subprocess

from hvtrain.system import host_facts
from hvtrain.system.host_facts import checkout


def git(folder, *arguments):
    own = ["-c", "user.name=x", "-c", "user.email=x@localhost", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *own, *arguments], cwd=folder, check=True, capture_output=True)


def test_a_checkout_has_its_commit_and_what_is_changed(tmp_path, monkeypatch):
    git(tmp_path, "init", "-b", "main")
    (tmp_path / "train.py").write_text("rate = 1\n")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-m", "begin")
    clean = checkout(tmp_path)
    assert (clean["branch"], clean["changed"], clean["diff"]) == ("main", [], "") and len(
        clean["commit"]
    ) == 40
    (tmp_path / "train.py").write_text("rate = 2\n")
    (tmp_path / "password.txt").write_text("hunter2")
    result = checkout(tmp_path)
    assert result["changed"] == [" M train.py", "?? password.txt"]
    assert "+rate = 2" in result["diff"] and "hunter2" not in result["diff"]
    monkeypatch.setattr(host_facts, "MAX_DIFF", 10)
    assert checkout(tmp_path)["diff"].startswith("diff --git\n... and ")


def test_another_folder_has_none(tmp_path, monkeypatch):
    assert checkout(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout(tmp_path) is None
