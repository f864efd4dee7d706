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
# Creates the modules that are sent, under their own names, whether or not hvtrain is installed there.
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
    """How hosts are reached: `-p` and `-i` of horovodrun. Users and the rest belong into ~/.ssh/config."""

    port: int | None = None
    identity_file: str | None = None

    @property
    def options(self) -> list[str]:
        """Words between ssh and the host. A new host becomes known; one whose key has changed is refused."""
        settings = ["BatchMode=yes", "StrictHostKeyChecking=accept-new", f"ConnectTimeout={CONNECT_SECONDS}"]
        # A lost host is noticed within a minute, also in the middle of a run.
        settings += ["ServerAliveInterval=10", "ServerAliveCountMax=3"]
        words = [word for setting in settings for word in ("-o", setting)]
        words += ["-p", str(self.port)] if self.port else []
        return words + (["-i", self.identity_file] if self.identity_file else [])

    def run(
        self, host: str, words: list[str], given: str = "", timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Runs words on the host, with `given` as its input. Raises subprocess.TimeoutExpired."""
        line = ["ssh", *self.options, host, shlex.join(words)]
        return subprocess.run(line, input=given, capture_output=True, text=True, timeout=timeout, check=False)

    def trouble(self, host: str, said: str) -> str:
        """Why ssh failed and what to do, in one line, from what it said."""
        reason = next((line for line in reversed(said.strip().splitlines()) if line.strip()), "it said nothing").strip()
        port = f" -p {self.port}" if self.port else ""
        if "Could not resolve" in said or "Name or service not known" in said:
            fix = "add it to /etc/hosts or DNS (an alias of ~/.ssh/config is not enough), or give -H its address"
            return f"host {host} has no IPv4 address here; {fix}"
        if "Permission denied" in said:
            found = f"host {host} does not let {getpass.getuser()} in without a password: {reason.split(': ')[-1]}"
            fix = f"ssh-copy-id{port} -i {self.identity_file or '~/.ssh/id_ed25519'} {host}"
            return f"{found}; {fix} (no key yet: ssh-keygen -t ed25519), or name the key with -i"
        if "HOST IDENTIFICATION HAS CHANGED" in said or "Host key verification failed" in said:
            name = f"[{host}]:{self.port}" if self.port else host
            return f"host {host} shows another host key than before; if it was reinstalled: ssh-keygen -R {name}"
        if "refused" in said:
            return f"nothing answers ssh on host {host}, port {self.port or 22}; start sshd there, or name its port: -p"
        if "timed out" in said or "No route" in said or "unreachable" in said:
            return f"host {host} cannot be reached ({reason.split(': ')[-1]}); is it up, and on this network?"
        return f"ssh to host {host} failed: {reason}; try: ssh{port} {host} true"


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
    found = re.search(rf"^{_ANSWER} (.*)$", output, re.MULTILINE)
    return json.loads(found[1]) if found else None
