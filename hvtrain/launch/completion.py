"""`python -m hvtrain completion bash`: prints a script that completes groups, choices and settings in the shell.

The script holds all names itself, so that the Tab key starts no Python; only --config-dir is looked into at that time.
"""

import dataclasses
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hvtrain.commands import COMMANDS
from hvtrain.config.compose import CONFIGS
from hvtrain.config.schema import BUNDLES, GROUPS, SEVERAL, ModelOptions, RunConfig
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
    """The script, with the groups and settings that there are, and to which choices some of these belong."""
    known: dict[str, Iterable[str]] = {**declared(RunConfig), **declared(ModelOptions, "model.")}
    owners: dict[str, list[str]] = {}
    for argument, settings in _choices():
        for name, choices in settings.items():
            known[name] = choices
            owners.setdefault(name, []).append(argument)
    known["cluster"] = ["ssh", *KINDS]
    for kind in KINDS.values():
        known |= declared(kind, "cluster.")
    for group in (*GROUPS, *SEVERAL, *BUNDLES, "sweep"):
        known[group] = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))

    takes_settings = {name: str(int(command.takes_settings)) for name, command in COMMANDS.items()}
    tables: dict[str, Mapping[str, Iterable[str]]] = {
        "@VALUES@": known,
        "@OWNERS@": owners,
        "@COMMANDS@": takes_settings,
    }
    text = BASH.read_text("utf-8").replace("@PROGRAMS@", " ".join(PROGRAMS))
    for mark, table in tables.items():
        text = text.replace(mark, "\n".join(f"  [{name}]='{' '.join(texts)}'" for name, texts in sorted(table.items())))
    return text


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


def _choices() -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Each choice of a group, as on a command line, with its settings and their values."""
    from omegaconf import OmegaConf

    for group in (*GROUPS, *SEVERAL):
        for path in sorted((CONFIGS / group).glob("*.yaml")):
            settings: Any = OmegaConf.to_container(OmegaConf.load(path))
            names = flatten(settings, f"{group}.").items()
            values = {name: SWITCH if isinstance(value, bool) else [] for name, value in names if "._" not in name}
            yield f"{group}={path.stem}", values
