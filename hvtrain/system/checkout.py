"""The state of the git checkout that a run was started from."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

SECONDS = 5.0
MAX_FILES, MAX_DIFF = 50, 20_000


def checkout(folder: Path) -> dict[str, Any] | None:
    """Commit, branch, names of changed files and the beginning of their diff; None outside a checkout, or without git.

    Files that git does not track are named, but their content is left out.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = (_git(folder, "status", "--porcelain", "--", ".") or "").splitlines()
    diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff", "--", ".") if changed else ""
    more = [f"... and {len(changed) - MAX_FILES:,} more"] if len(changed) > MAX_FILES else []
    text, rest = (diff or "")[:MAX_DIFF], len(diff or "") - MAX_DIFF
    return {
        "commit": commit.strip(),
        "branch": (_git(folder, "rev-parse", "--abbrev-ref", "HEAD") or "").strip(),
        "changed": [*changed[:MAX_FILES], *more],
        "diff": f"{text}\n... and {rest:,} more characters" if rest > 0 else text,
    }


def _git(folder: Path, *words: str) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", "--no-optional-locks", *words],
            cwd=folder,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=True,
        )
        return done.stdout.decode(errors="replace")
    return None
