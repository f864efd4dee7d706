"""Collects one host's facts. ask_hosts runs it with that host's own Python, whatever is installed there.

The probe's modules need nothing but the standard library of Python 3.9.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvtrain.doctor import probe_files, probe_machine, probe_network
from hvtrain.system import host_facts, interfaces

DATASET_SECONDS = 12.0


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to {"work": "facts" or "ports", ...}, with the host's clock before and after.

    Raises OSError in "ports" if the port was taken meanwhile.
    """
    began = time.time()
    works: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"facts": _facts, "ports": _ports}
    return {**works[request["work"]](request), "began": began, "ended": time.time()}


def _facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """request: folder, in which ranks start and Python searches first; python_path, which it searches next; ..."""
    sys.path[:] = [request["folder"], *request["python_path"], *(path for path in sys.path if path)]
    folder = Path(request["folder"])
    return {
        "hostname": socket.gethostname(),
        "working_folder": str(folder),
        "folder_exists": folder.is_dir() and os.access(folder, os.X_OK),
        "python": host_facts.python_facts(request["python"]),
        "packages": host_facts.package_versions(),
        "cuda": host_facts.cuda_versions(),
        "code": host_facts.code_facts(),
        "horovod": host_facts.horovod_facts(),
        "addresses": probe_network.addresses(request["names"]),
        "interfaces": interfaces.all_interfaces(),
        "port": probe_network.free_port(),
        "shared_memory": probe_machine.shared_memory(),
        "open_files": probe_machine.open_files(),
        "disk": probe_machine.disk(folder / request["run_dir"]),
        "gpus": probe_machine.gpus(),
        "dataset": probe_files.fingerprint(folder / request["dataset"], DATASET_SECONDS)
        if request["dataset"]
        else None,
    }


def _ports(request: Mapping[str, Any]) -> dict[str, Any]:
    exchange = probe_network.Exchange(request["me"], request["port"], request["token"], request["others"])
    return exchange.run(request["seconds"])
