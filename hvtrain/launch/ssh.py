"""Runs commands and functions on other hosts by ssh without asking anything, and explains failures in one line.

A function needs only Python there: the text of its modules is sent along.
"""

import getpass
import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

CONNECT_SECONDS = 10
SSH_FAILED = 255
_ANSWER = "hvtrain-answer:"
# Creates the modules that are sent, under their own names, with or without hvtrain on that host.
LOADER = f"""
import json, sys, types
modules, (name, function, arguments) = json.load(sys.stdin)
for full_name, text in modules:
    module = sys.modules[full_name] = types.ModuleType(full_name)
    parent, _, leaf = full_name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
    exec(compile(text, full_name, "exec"), module.__dict__)
print("{_ANSWER}", json.dumps(getattr(sys.modules[name], function)(*arguments)))
"""


@dataclass(frozen=True)
class Ssh:
    """Options of ssh: `-p` and `-i` of horovodrun.

    Users and all others belong into ~/.ssh/config.
    """

    port: int | None = None
    identity_file: str | None = None

    @property
    def options(self) -> list[str]:
        """The words between ssh and the host.

        A new host becomes known; one whose key has changed is refused.
        """
        settings = [
            "BatchMode=yes",
            "StrictHostKeyChecking=accept-new",
            f"ConnectTimeout={CONNECT_SECONDS}",
            # A lost host is noticed within a minute, also in the middle of a run.
            "ServerAliveInterval=10",
            "ServerAliveCountMax=3",
        ]
        options = [part for setting in settings for part in ("-o", setting)]
        if self.port:
            options += ["-p", str(self.port)]
        if self.identity_file:
            options += ["-i", self.identity_file]
        return options

    def run(
        self,
        host: str,
        command: list[str],
        stdin: str = "",
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the host. Raises subprocess.TimeoutExpired."""
        return subprocess.run(
            ["ssh", *self.options, host, shlex.join(command)],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def trouble(self, host: str, output: str) -> str:
        """Explains in one line, from its error output, why ssh failed and what to do."""
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        last = ["it said nothing", *lines][-1]
        reason = last.split(": ")[-1]
        port = f" -p {self.port}" if self.port else ""

        if "Could not resolve" in output or "Name or service not known" in output:
            return (
                f"host {host} has no IPv4 address here; "
                "add it to /etc/hosts or DNS (an alias of ~/.ssh/config is not enough), or give -H its address"
            )
        if "Permission denied" in output:
            return (
                f"host {host} does not let {getpass.getuser()} in without a password: {reason}; "
                f"ssh-copy-id{port} -i {self.identity_file or '~/.ssh/id_ed25519'} {host} "
                "(no key yet: ssh-keygen -t ed25519), or name the key with -i"
            )
        if "HOST IDENTIFICATION HAS CHANGED" in output or "Host key verification failed" in output:
            name = f"[{host}]:{self.port}" if self.port else host
            return f"host {host} shows another host key than before; if it was reinstalled: ssh-keygen -R {name}"
        if "refused" in output:
            return f"nothing answers ssh on host {host}, port {self.port or 22}; start sshd there, or name its port: -p"
        if "timed out" in output or "No route" in output or "unreachable" in output:
            return f"host {host} cannot be reached ({reason}); is it up, and on this network?"
        return f"ssh to host {host} failed: {last}; try: ssh{port} {host} true"


def request(modules: Sequence[ModuleType], function: str, *arguments: Any) -> str:
    """The input of `python -c LOADER`, which then calls a function of the last module; the others are its imports."""
    packages = sorted({"hvtrain", *(module.__name__.rpartition(".")[0] for module in modules)})
    texts = [(module.__name__, Path(str(module.__file__)).read_text(encoding="utf-8")) for module in modules]
    call = (modules[-1].__name__, function, arguments)
    return json.dumps(([*((package, "") for package in packages), *texts], call))


def answer(output: str) -> Any:
    """The function's result from what `python -c LOADER` printed; None if it is not there.

    The greeting of a login shell may stand before it.
    """
    match = re.search(rf"^{_ANSWER} (.*)$", output, re.MULTILINE)
    return json.loads(match[1]) if match else None
