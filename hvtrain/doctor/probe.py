"""What hosts.py runs on each host by that host's own Python, whatever is installed there: a request in, facts out.

Only the probe's own files are sent: the standard library, as Python 3.9 has it, must do.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvtrain.doctor import probe_files, probe_machine, probe_network, probe_software

DATASET_SECONDS = 12.0


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """What the host answers to {"work": "facts" or "ports", ...}, and its clock before and after.

    Raises OSError, in "ports", where the port was taken meanwhile.
    """
    began = time.time()
    works: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"facts": _facts, "ports": _ports}
    return {**works[request["work"]](request), "began": began, "ended": time.time()}


def _facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """All that is looked at on one host.

    folder: where ranks are started, which Python then searches first; python_path: what it searches next.
    """
    sys.path[:] = [request["folder"], *request["python_path"], *(path for path in sys.path if path)]
    folder = Path(request["folder"])
    return {
        "hostname": socket.gethostname(),
        "working_folder": str(folder),
        "folder_exists": folder.is_dir() and os.access(folder, os.X_OK),
        "python": probe_software.python_facts(request["python"]),
        "packages": probe_software.package_versions(),
        "cuda": probe_software.cuda_versions(),
        "code": probe_software.code_facts(),
        "horovod": probe_software.horovod_facts(),
        "addresses": probe_network.addresses(request["names"]),
        "interfaces": probe_network.all_interfaces(),
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
