"""Answers a command line that Hydra refuses: one line with what came and what to write instead."""

import re
from typing import Any, cast

from omegaconf import OmegaConf

from hvtrain.config.compose import ALL_GROUPS, choice_files, compose, own_folders
from hvtrain.config.schema import GROUPS, SEVERAL
from hvtrain.config.validate import closest, flatten, nearest
from hvtrain.errors import ConfigError

# An argument that chooses: model=cnn, and not model={...}.
_CHOICE = re.compile(rf"\+?({'|'.join(ALL_GROUPS)})=[^{{]+")
# What other libraries set, and here the launcher does.
_NUMBERS_OF_RANKS = ("np", "gpus", "num_gpus", "devices", "nodes", "num_nodes", "ranks", "workers", "num_workers")
_START = "the number of ranks is the launcher's: horovodrun -np 2 python -m hvtrain ..."
# Characters of a value that a message repeats.
_MOST_QUOTED = 200
# Texts of Hydra 1.3, with what they quote, and what is said instead.
_ANSWERS = {
    r"(?:item is already at '|force-add of config groups is not supported: '\++|Multiple values for )([\w.]*\w)": (
        "{0} is there already; write it without a plus: {0}=VALUE"
    ),
    r"Could not delete.* '([^']+)'": "~{0} removes what is not there, or has another value; leave it out",
    r"Sweep parameters '([^']+)'": "{0} asks for several runs; use a command for each, or python -m hvtrain sweep",
    r"Ambiguous value for argument '(([^'=]+)=([^']*))'": (
        "{0} has several values; give one, a list ({1}=[{2}]), or quote it: \"{1}='{2}'\""
    ),
}


def check_form(arguments: list[str]) -> None:
    """Raises ConfigError for an argument that is neither a setting nor an option of ours.

    Hydra would answer it with a page of usage, or take it for an option of its own.
    """
    for argument in arguments:
        if argument.startswith("-"):
            name = argument.strip("-").partition("=")[0].replace("-", "_")
            hint = _meaning(name, [*flatten(compose([])[0]), *ALL_GROUPS])
            raise ConfigError(f"unknown option {argument}; {hint or 'see python -m hvtrain --help'}")
        if not re.match("~|[^=]+=", argument):
            raise ConfigError(f"{argument!r} is not a setting; write SETTING=VALUE in one word, such as train.epochs=3")
        group, _, choice = argument.partition("=")
        # Hydra would merge them into one, of which nobody could say what it is.
        if group in GROUPS and choice.startswith("["):
            raise ConfigError(f"{argument} has several choices, and a run has one {group}; write {group}=NAME")


def explain(error: Exception, line: list[str]) -> str:
    """Rewrites an error of Hydra 1.3 about a command line in one line. Its texts are matched literally."""
    text = " ".join(str(error).split())
    unknown = re.search(r"(?:Could not override|config group) '([^']+)'", text)
    if unknown:
        return _unknown_setting(unknown[1], line)
    choice = re.search(r"Could not (?:find|load) '([^'/]+)/([^']*)'", text)
    if choice:
        return _unknown_choice(choice[1], choice[2], line)
    if "Config group override" in text or isinstance(error, OSError):
        # Of a value that is no text, such as null, Hydra names only the type; and a long one is no name of a file.
        for group, _, name in (argument.lstrip("+~").partition("=") for argument in line):
            if group in ALL_GROUPS and name not in _names(group, line):
                return _unknown_choice(group, name, line)

    for pattern, answer in _ANSWERS.items():
        quoted = re.search(pattern, text)
        if quoted:
            return answer.format(*quoted.groups())

    name, _, value = getattr(error, "override", "").partition("=")
    if name:
        # It may be a misspelt notify=, whose address holds a secret.
        if "://" in value or len(value) > _MOST_QUOTED:
            value = "..."
        return f"{name}={value} has a character that is special to Hydra; put it in quotes: \"{name}='{value}'\""

    setting = getattr(error, "full_key", None)
    if setting:
        reason = str(error).partition("\n")[0].rpartition(": ")[2].strip('"')
        return f"{setting} refers to what is not there: {reason}; set that, or give {setting}=VALUE"
    return f"the settings cannot be composed: {text}; see --help"


def _unknown_choice(group: str, name: str, line: list[str]) -> str:
    names = _names(group, line)
    match = closest(name, names)
    advice = "--help describes them"
    if match:
        advice = f"did you mean {group}={match}?"
    # As Keras writes its classes.
    if group == "model" and name[:1].isupper():
        advice += f" Networks of keras.applications: model=application model.name={name}"
    return f"{group}={name} is not one of {', '.join(names)}; {advice}"


def _unknown_setting(name: str, line: list[str]) -> str:
    """Why there is no such setting in the choices of this command line, and what to write."""
    chosen = [argument for argument in line if _CHOICE.fullmatch(argument)]
    chosen += [f"--config-dir={folder}" for folder in own_folders(line)]
    tree: dict[str, Any] = {}
    # The choices alone may be what cannot be composed.
    if chosen != line:
        (tree,) = compose(chosen)
    parent = name
    while parent and not isinstance(_at(tree, parent), dict):
        parent = parent.rpartition(".")[0]

    group, _, setting = name.partition(".")
    key = setting.partition(".")[0]
    choices = [path.stem for path in choice_files(group, line) if key in cast("dict", OmegaConf.load(path))]
    if choices and key not in tree.get(group, ()):
        return f"{name} is a setting of {group}={', '.join(choices)} alone; choose one of these, or leave it out"

    # Without what belongs to Hydra, such as _target_.
    known = [other for other in flatten(tree) if "._" not in other]
    inside = [other for other in known if other.startswith(f"{parent}.")]
    hint = _meaning(name, inside if "." in parent else [*known, *ALL_GROUPS])
    # The other groups are declared, so nothing can be added to them.
    if hint is None and parent and group in (*GROUPS, *SEVERAL):
        present = ", ".join(part for part in _at(tree, parent) if not part.startswith("_"))
        hint = f"{parent} has {present or 'none'}; a plus adds a new one: +{name}=VALUE"
    return f"unknown setting '{name}'; {hint or nearest(name, inside or [*tree])}"


def _meaning(name: str, known: list[str]) -> str | None:
    """What a wrong name most likely stands for, as advice; None if nothing is like it."""
    if name.rpartition(".")[2] in _NUMBERS_OF_RANKS:
        return _START
    match = closest(name, known)
    if match is None:
        return None
    return f"did you mean '{match}'?"


def _at(tree: Any, name: str) -> Any:
    """The part of a tree of settings that has this dotted name; None if it has none."""
    for part in name.split("."):
        if not isinstance(tree, dict):
            return None
        tree = tree.get(part)
    return tree


def _names(group: str, line: list[str]) -> list[str]:
    return sorted(path.stem for path in choice_files(group, line))
