"""Chooses which of the launcher's environment variables are sent to the ranks: an allow-list keeps secrets out."""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from hvtrain.errors import ConfigError
from hvtrain.system.secrets import NOTIFY_VARIABLE as NOTIFY
from hvtrain.system.secrets import SECRET, without_passwords

Variables = Mapping[str, str]

# Variables with which a rank finds its code and object storage, sets its locale, or tunes its
# libraries.
_ALLOWED = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHON\w+|VIRTUAL_ENV|OPAL_PREFIX|LANG|LC_\w+|TZ|SPT_NOENV|"
    r"AWS_(ENDPOINT_URL\w*|REGION|DEFAULT_REGION|PROFILE)|AZURE_STORAGE_(ACCOUNT|SERVICE_ENDPOINT)|"
    r"(HOROVOD|HVTRAIN|TF|XLA|KERAS|NCCL|CUDA|CUDNN|OMP|MKL|KMP|GLOO|UCX|FI|OMPI|PMIX_MCA|GOMP|MALLOC|TCMALLOC)_\w+"
)
# Variables that are never sent, since they describe a rank of another launch, or this host's GPUs.
_NEVER_SENT = re.compile(
    r"\w*CUDA_VISIBLE_DEVICES|OMPI_(COMM|UNIVERSE)_\w+|"
    r"HOROVOD_(RANK|SIZE|LOCAL_\w+|CROSS_\w+|GLOO_(?!TIMEOUT_SECONDS)\w+|HOSTNAME)"
)
# Variables that programs on this host, such as ssh, need; other hosts have their own values.
_LOCAL = re.compile(
    r"HOME|USER|LOGNAME|SHELL|TERM|TMPDIR|SSH_AUTH_SOCK|KRB5\w+|XDG_\w+|HOSTNAME|"
    r"\w*CUDA_VISIBLE_DEVICES"
)
# Names of further variables that horovodrun sends to the ranks, separated by commas.
EXTRA_NAMES = "HVTRAIN_ENV"


def for_ranks(environ: Variables, options: Iterable[str] = ()) -> dict[str, str]:
    """Returns the variables that ranks get over ssh: those allowed, those of --env, and the notification addresses."""
    variables = {name: value for name, value in environ.items() if is_sendable(name, environ)}
    # Programs of this Python environment are found on every host,
    # even if it is not activated there.
    variables.update(own_environment(variables.get("PATH", "")))

    if NOTIFY in environ:
        options = [NOTIFY, *options]
    extra = parse_env_options(environ, options)
    variables.update(extra)
    # Without the names, horovodrun could not tell these variables from the launcher's own.
    variables[EXTRA_NAMES] = ",".join(extra)
    return variables


def parse_env_options(environ: Variables, options: Iterable[str]) -> dict[str, str]:
    """Returns the variables of `--env NAME` and `--env NAME=VALUE`. Raises ConfigError for any other form."""
    variables = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError(f"--env: {name!r} is not a variable's name; write --env NAME=VALUE")
        if not equals and name not in environ:
            raise ConfigError(
                f"--env {name}: no such variable is set here; set it, or write --env {name}=VALUE"
            )
        variables[name] = value if equals else environ[name]
    return variables


def own_environment(path: str) -> dict[str, str]:
    """Returns PATH with this Python's programs, put first if missing, so that nobody needs to activate the environment.

    Adds OPAL_PREFIX if Open MPI is part of the environment: otherwise Open MPI on other hosts would
    look for its files where it was built.
    """
    programs = f"{sys.prefix}/bin"
    variables = {"PATH": path}
    if programs not in path.split(":"):
        variables["PATH"] = f"{programs}:{path or os.defpath}"
    if list(Path(sys.prefix, "lib").glob("libmpi.so*")):
        variables["OPAL_PREFIX"] = sys.prefix
    return variables


def for_launcher(environ: Variables, rank_variables: Variables) -> dict[str, str]:
    """Returns the launcher's own variables: those of the ranks and those of this host."""
    of_host = {name: value for name, value in environ.items() if _LOCAL.fullmatch(name)}
    # The ranks' values take precedence: --env may have changed one of these variables. Output is
    # unbuffered, so that each line arrives even if its rank is killed right after printing it.
    return {**of_host, **rank_variables, "PYTHONUNBUFFERED": "1"}


def is_sendable(name: str, environ: Variables) -> bool:
    """Returns True if a variable may be sent to other hosts: allowed, and with no secret in its name or value."""
    is_allowed = bool(_ALLOWED.fullmatch(name)) and not _NEVER_SENT.fullmatch(name)
    value = environ.get(name, "")
    return is_allowed and not SECRET.search(name) and without_passwords(value) == value
