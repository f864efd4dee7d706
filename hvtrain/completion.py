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
from hvtrain.config.model_options import ModelOptions
from hvtrain.config.schema import GROUPS, SEVERAL, RunConfig
from hvtrain.config.validate import flatten
from hvtrain.launch.clusters.choice import KINDS
from hvtrain.system.command import Parser

# What a line with one of them begins with. Where the line has none of them, these complete names of files.
PROGRAMS = ("hvtrain", "python", "python3", "horovodrun", "mpirun", "./scripts/run")
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
        known |= declared(kind.settings, "cluster.")
    values = "\n".join(f"  [{name}]='{' '.join(choices)}'" for name, choices in sorted(known.items()))
    commands = " ".join(f"[{name}]={int(command.takes_settings)}" for name, command in COMMANDS.items())
    text = BASH.read_text("utf-8").replace("@VALUES@", values)
    return text.replace("@COMMANDS@", commands).replace("@PROGRAMS@", " ".join(PROGRAMS))


def declared(schema: type, prefix: str = "") -> dict[str, list[str]]:
    """The settings of a dataclass and of its sections by dotted names, with the values they are limited to, if any."""
    found: dict[str, list[str]] = {}
    hints = typing.get_type_hints(schema)
    for item in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[item.name]):
            found |= declared(typing.cast(type, hints[item.name]), f"{prefix}{item.name}.")
        elif item.default is not dataclasses.MISSING:
            is_switch = hints[item.name] is bool
            found[prefix + item.name] = ["true", "false"] if is_switch else list(item.metadata["choices"])
    return found


def _groups() -> dict[str, list[str]]:
    """Each group with its choices, and the choices' own settings."""
    from omegaconf import OmegaConf

    found: dict[str, list[str]] = {}
    for group in (*GROUPS, *SEVERAL, "experiment"):
        files = sorted((CONFIGS / group).glob("*.yaml"))
        found[group] = [path.stem for path in files]
        for path in files if group != "experiment" else ():
            own: Any = OmegaConf.to_container(OmegaConf.load(path))
            switches = {name: isinstance(value, bool) for name, value in flatten(own, f"{group}.").items()}
            names = {name: is_switch for name, is_switch in switches.items() if "._" not in name}
            found |= {name: ["true", "false"] if is_switch else [] for name, is_switch in names.items()}
    return found
