"""The state of the git checkout that a run was started from."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

SECONDS = 5.0
MAX_FILES, MAX_DIFF = 50, 20_000


def checkout(folder: Path) -> dict[str, Any] | None:
    """Describes the git checkout of a folder; None outside a checkout, or without git.

    Returns:
        Its commit, branch, the names of changed files and the beginning of their diff. Files that
        git does not track are named, but their content is left out.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = (_git(folder, "status", "--porcelain", "--", ".") or "").splitlines()
    diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff", "--", ".") if changed else ""
    diff = diff or ""
    if len(diff) > MAX_DIFF:
        diff = f"{diff[:MAX_DIFF]}\n... and {len(diff) - MAX_DIFF:,} more characters"
    if len(changed) > MAX_FILES:
        changed = [*changed[:MAX_FILES], f"... and {len(changed) - MAX_FILES:,} more"]
    branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD") or ""
    return {"commit": commit.strip(), "branch": branch.strip(), "changed": changed, "diff": diff}


def _git(folder: Path, *arguments: str) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            cwd=folder,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=True,
        )
        return done.stdout.decode(errors="replace")
    return None
