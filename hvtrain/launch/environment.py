"""Chooses the launcher's variables that travel to the ranks: by an allow-list, so that no secret does."""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from hvtrain.errors import ConfigError
from hvtrain.system.addresses import VARIABLE as NOTIFY
from hvtrain.system.secrets import SECRET, without_passwords

# They let a rank find its code, and tune the libraries under it.
_ALLOWED = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHON\w+|VIRTUAL_ENV|OPAL_PREFIX|LANG|LC_\w+|TZ|"
    r"(HOROVOD|HVTRAIN|TF|XLA|KERAS|NCCL|CUDA|CUDNN|OMP|MKL|KMP|GLOO|UCX|FI|OMPI|PMIX_MCA|GOMP|MALLOC|TCMALLOC)_\w+"
)
# They describe a place in another launch, or this host's GPUs.
_LEFT = re.compile(
    r"\w*CUDA_VISIBLE_DEVICES|HOROVOD_(RANK|SIZE|LOCAL_\w+|CROSS_\w+|GLOO_\w+|HOSTNAME)|OMPI_(COMM|UNIVERSE)_\w+"
)
# Needed by programs on this host, such as ssh; another host has its own.
_OF_THIS_HOST = re.compile(
    r"HOME|USER|LOGNAME|SHELL|TERM|TMPDIR|SSH_AUTH_SOCK|XDG_\w+|HOSTNAME|\w*CUDA_VISIBLE_DEVICES"
)
# More names for horovodrun to let travel, separated by commas.
MORE = "HVTRAIN_ENV"


def for_ranks(environ: Mapping[str, str], words: Iterable[str] = ()) -> dict[str, str]:
    """The variables that ranks get over ssh: those allowed, those asked for, and the addresses of notices."""
    chosen = {name: value for name, value in environ.items() if travels(name, environ)}
    chosen.update(of_this_environment(chosen.get("PATH", "")))
    asked = asked_for(environ, [*([NOTIFY] if NOTIFY in environ else []), *words])
    # horovodrun cannot tell them from the launcher's own otherwise.
    return {**chosen, **asked, **({MORE: ",".join(asked)} if asked else {})}


def asked_for(environ: Mapping[str, str], words: Iterable[str]) -> dict[str, str]:
    """The variables of `--env NAME` and `--env NAME=VALUE`. Raises ConfigError for any other."""
    chosen = {}
    for word in words:
        name, given, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError(f"--env {word}: {name!r} is not a variable's name; write --env NAME=VALUE")
        if not given and name not in environ:
            raise ConfigError(f"--env {name}: no such variable is set here; set it, or write --env {name}=VALUE")
        chosen[name] = value if given else environ[name]
    return chosen


def of_this_environment(path: str) -> dict[str, str]:
    """PATH with this Python's programs first, and Open MPI's place if it is part of this environment.

    So nobody needs to activate it. On other hosts Open MPI looks for its parts where it was built.
    """
    programs = f"{sys.prefix}/bin"
    found = {"PATH": path if programs in path.split(":") else f"{programs}:{path or os.defpath}"}
    if list(Path(sys.prefix, "lib").glob("libmpi.so*")):
        found["OPAL_PREFIX"] = sys.prefix
    return found


def for_launcher(environ: Mapping[str, str], ranks: Mapping[str, str]) -> dict[str, str]:
    """The launcher's own variables: the ranks' and this host's."""
    return {**{name: value for name, value in environ.items() if _OF_THIS_HOST.fullmatch(name)}, **ranks}


def travels(name: str, environ: Mapping[str, str]) -> bool:
    """True for a variable that other hosts may have: it is allowed, and neither its name nor its value looks secret."""
    is_known = bool(_ALLOWED.fullmatch(name)) and not _LEFT.fullmatch(name)
    value = environ.get(name, "")
    return is_known and not SECRET.search(name) and without_passwords(value) == value
