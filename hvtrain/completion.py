"""`python -m hvtrain completion bash`: prints a script that completes groups, choices and settings in the shell.

The script holds all names itself, so that the Tab key starts no Python; only --config-dir is looked into at that time.
"""

import dataclasses
import sys
import typing
from pathlib import Path
from typing import Any

from hvtrain.commands import COMMANDS
from hvtrain.config.compose import CONFIGS
from hvtrain.config.schema import GROUPS, SEVERAL, ModelOptions, RunConfig
from hvtrain.config.validate import flatten
from hvtrain.launch.cluster_kinds import KINDS
from hvtrain.system.command import Parser

# A line that begins with one of these may hold hvtrain's settings. Without a match the shell completes file names.
PROGRAMS = ("hvtrain", "python", "python3", "horovodrun", "mpirun", "./scripts/run")
SWITCH = ["true", "false"]
BASH = Path(__file__).with_name("completion.bash")


def main() -> int:
    """Prints the script. Raises ConfigError for another shell."""
    parser = Parser(
        "python -m hvtrain completion",
        usage="%(prog)s bash",
        description="Prints completion for a shell: source <(python -m hvtrain completion bash), also in ~/.bashrc.",
    )
    parser.add_argument("shell", choices=["bash"], help="bash 4.4 or newer")
    parser.parse_args(sys.argv[1:])
    print(script())
    return 0


def script() -> str:
    """The script, with the groups and settings that there are."""
    known = {**_groups(), **declared(RunConfig), **declared(ModelOptions, "model.")}
    known |= {"cluster": ["ssh", *KINDS]}
    for kind in KINDS.values():
        known |= declared(kind, "cluster.")
    values = "\n".join(f"  [{name}]='{' '.join(choices)}'" for name, choices in sorted(known.items()))
    commands = " ".join(f"[{name}]={int(command.takes_settings)}" for name, command in COMMANDS.items())
    text = BASH.read_text("utf-8").replace("@VALUES@", values)
    return text.replace("@COMMANDS@", commands).replace("@PROGRAMS@", " ".join(PROGRAMS))


def declared(schema: type, prefix: str = "") -> dict[str, list[str]]:
    """The settings of a dataclass and of its sections by dotted names, with the values they are limited to, if any."""
    values: dict[str, list[str]] = {}
    hints = typing.get_type_hints(schema)
    for item in dataclasses.fields(schema):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            values |= declared(typing.cast(type, hint), f"{prefix}{item.name}.")
        elif hint is bool:
            values[prefix + item.name] = SWITCH
        elif item.default is not dataclasses.MISSING:
            values[prefix + item.name] = list(item.metadata["choices"])
    return values


def _groups() -> dict[str, list[str]]:
    """Each group with its choices, and the choices' own settings."""
    from omegaconf import OmegaConf

    values: dict[str, list[str]] = {}
    for group in (*GROUPS, *SEVERAL, "experiment"):
        files = sorted((CONFIGS / group).glob("*.yaml"))
        values[group] = [path.stem for path in files]
        if group == "experiment":  # It sets other groups' settings, and has none.
            continue
        for path in files:
            settings: Any = OmegaConf.to_container(OmegaConf.load(path))
            for name, value in flatten(settings, f"{group}.").items():
                if "._" not in name:
                    values[name] = SWITCH if isinstance(value, bool) else []
    return values
