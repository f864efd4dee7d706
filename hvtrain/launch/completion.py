"""`python -m hvtrain completion bash`: prints a script that completes groups, choices and settings in the shell.

The script contains all names, so that pressing Tab does not start Python; only the folder of
--config-dir is read at completion time.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hvtrain.config.choices import ALL_GROUPS, choice_files, default_choice, settings_of
from hvtrain.config.schema import GROUPS, SEVERAL, ModelOptions, RunConfig
from hvtrain.core.commands import COMMANDS
from hvtrain.launch.cluster_kinds import KINDS
from hvtrain.system.command import Parser
from hvtrain.system.text import flatten

SWITCH = ["true", "false"]


def main() -> int:
    """Prints the script. Raises ConfigError for any shell but bash."""
    parser = Parser(
        "python -m hvtrain completion",
        usage="%(prog)s bash",
        description="Prints a completion script; in ~/.bashrc, write: source <(python -m hvtrain completion bash)",
    )
    parser.add_argument("shell", choices=["bash"], help="bash 4.4 or newer")
    parser.parse_args()
    print(script())
    return 0


def script() -> str:
    """Returns the script, with all groups and settings, and for a choice's setting each GROUP=CHOICE that has it."""
    known = setting_values(RunConfig) | setting_values(ModelOptions, "model.")
    # These settings belong to all runs, even if a choice's file lists them too.
    shared = [*known]
    owners = defaultdict(list)
    for group in (*GROUPS, *SEVERAL):
        for path in choice_files(group):
            settings: Any = OmegaConf.to_container(OmegaConf.load(path))
            for name, value in flatten(settings, f"{group}.").items():
                # Names such as _target_ are not settings.
                if "._" in name:
                    continue
                known[name] = SWITCH if isinstance(value, bool) else []
                if name not in shared:
                    owners[name].append(f"{group}={path.stem}")
    known["cluster"] = ["ssh", *KINDS]
    for kind in KINDS.values():
        known |= setting_values(kind, "cluster.")
    for group in (*ALL_GROUPS, "sweep"):
        known[group] = [path.stem for path in choice_files(group)]

    tables = {
        "@VALUES@": known,
        "@OWNERS@": owners,
        "@COMMANDS@": {
            name: [str(int(command.takes_settings))] for name, command in COMMANDS.items()
        },
        "@DEFAULTS@": {group: [default_choice(group) or ""] for group in GROUPS},
    }
    text = Path(__file__).with_name("completion.bash").read_text("utf-8")
    for mark, table in tables.items():
        text = text.replace(
            mark,
            "\n".join(f"  [{name}]='{' '.join(texts)}'" for name, texts in sorted(table.items())),
        )
    return text


def setting_values(schema: type, prefix: str = "") -> dict[str, list[str]]:
    """Returns the settings of a dataclass and its sections by dotted name, each with its allowed values, if limited."""
    return {
        name: SWITCH if hint is bool else list(item.metadata["choices"])
        for name, hint, item in settings_of(schema, prefix)
    }
