"""Small disks for tests: real file systems that fill up, run out of files, or refuse to be written."""

import os
import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def small_disk(folder, options):
    """A tmpfs over the folder, with mount's options. Needs root; the test is skipped without."""
    folder.mkdir(parents=True, exist_ok=True)
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", folder], check=False
        ).returncode
    ):
        pytest.skip("a disk of its own needs root and mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def remounted(disk, options):
    """Mounts the disk anew with these options; False where the system refuses, as it does while it is in use."""
    command = ["mount", "-o", f"remount,{options}", disk]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0
