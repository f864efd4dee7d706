"""Explains a command line that Hydra refuses, in one line: what was given and what to write instead."""

import re
from collections.abc import Callable
from pathlib import Path

from hvtrain.config.choices import ALL_GROUPS, choice_files, config_dirs
from hvtrain.config.schema import GROUPS, SEVERAL, RunConfig, Settings
from hvtrain.config.validate import SYNONYMS, closest, nearest, same_meaning
from hvtrain.errors import ConfigError
from hvtrain.system.secrets import without_secrets
from hvtrain.system.text import flatten

# The function compose.compose, passed in to find the settings that a
# refused command line could have used.
Compose = Callable[[list[str]], Settings]
# An argument that selects a choice, such as model=cnn, but not model={...}.
_CHOICE = re.compile(rf"\+?({'|'.join(ALL_GROUPS)})=[^{{]+")
_METRICS = "add a metric with +task.metrics.NAME._target_=keras.metrics.NAME"
# Advice on other libraries' names for settings, by a pattern that matches a name's last part.
_ADVICE = {
    "np|(num_)?(gpus|devices|nodes|ranks|workers)": (
        "the launcher sets the number of ranks: horovodrun -np 2 python -m hvtrain ..."
    ),
    "metrics?": _METRICS,
    "loss": "choose a loss with task.loss._target_=keras.losses.NAME",
}
# The maximum length of a value that a message repeats, in characters.
_MAX_QUOTED = 200
# Patterns of Hydra 1.3's messages, and our replacements, into which the
# groups of each pattern are filled.
_ANSWERS = {
    r"In '((?:experiment|debug)/[^']+)': Could not (?:find|override) '(?:experiment|debug)/": (
        "the defaults of {0}.yaml have a choice in the wrong form; write - override /GROUP: CHOICE"
    ),
    r"In '([^']+)': ConfigTypeError": "{0}.yaml does not hold settings; write each as NAME: VALUE",
    r"Error merging override \+*((?:task\.)?metrics=.*)": f"{{0}} does not name metrics; {_METRICS}",
    r"Error merging override \+*([^=]+)=(.*)": "{0}={1} is not a group of settings; write {0}.NAME=VALUE for each",
    r"(?:item is already at '|force-add of config groups is not supported: '\++|Multiple values for )([\w.]*\w)": (
        "{0} exists already; write it without a plus: {0}=VALUE"
    ),
    r"Could not delete.* '([^']+)'": "~{0} matches no setting of this run; leave it out",
    r"Sweep parameters '([^']+)'": "{0} asks for several runs; use a command for each, or python -m hvtrain sweep",
    r"Ambiguous value for argument '(([^'=]+)=([^']*))'": (
        "{0} has several values; give one, a list ({1}=[{2}]), or quote it: \"{1}='{2}'\""
    ),
}


def check_form(arguments: list[str], compose: Compose) -> None:
    """Raises ConfigError for an argument that is not of the form SETTING=VALUE.

    Hydra would print its own usage, or treat the argument as one of its own options.
    """
    for argument in arguments:
        if argument.startswith("-"):
            name = argument.strip("-").partition("=")[0].replace("-", "_")
            hint = _advice_on(name, [*flatten(compose([])), *ALL_GROUPS])
            raise ConfigError(
                f"unknown option {argument}; {hint or 'see python -m hvtrain --help'}"
            )
        if not re.match("~|[^=]+=", argument):
            raise ConfigError(
                f"{argument!r} is not a setting; write SETTING=VALUE in one word, such as train.epochs=3"
            )
        group, _, choice = argument.partition("=")
        # Hydra would merge the choices into one that makes no sense.
        if group in GROUPS and choice.startswith("["):
            raise ConfigError(
                f"{argument} has several choices, and a run has one {group}; write {group}=NAME"
            )
        name = group.lstrip("+~")
        if re.match(r"hydra\b", name):
            raise ConfigError(
                f"{argument} is a setting of Hydra, which a run does not use; set the run folder with run.dir=DIR"
            )
        # A removed setting would silently get its default. Only choices have
        # settings that can be left out.
        section = name.partition(".")[0]
        is_open = section in SEVERAL or (section in GROUPS and "." in name)
        is_needed = section in RunConfig.__annotations__ and not is_open
        # The user's own experiment may provide the group that ~GROUP removes.
        replacements = (f"+{name}", "experiment=") if name in GROUPS else f"+{name}"
        is_replaced = any(other.startswith(replacements) for other in arguments)
        if argument.startswith("~") and is_needed and not is_replaced:
            raise ConfigError(
                f"{argument} removes what every run needs; leave it out, or write {name}=VALUE"
            )


def check_experiment(arguments: list[str]) -> None:
    """Raises ConfigError for a chosen experiment whose settings Hydra would take for those of a group."""
    for path in choice_files("experiment", arguments):
        if f"experiment={path.stem}" not in arguments:
            continue
        # Hydra reads the package only at the top: after any other comment, the line has no effect.
        if not re.match(r"\s*#\s*@package\s+_global_", _text(path)):
            raise ConfigError(
                f"{path} does not begin with # @package _global_, without which its settings are not the run's; "
                "write this line at the top"
            )


def explain(error: Exception, arguments: list[str], compose: Compose) -> str:
    """Turns an error of Hydra 1.3 about a command line into one line: what is wrong, and what to write.

    Hydra's errors have no codes, so they are recognized by their texts.
    """
    # The YAML library's errors carry a mark with their position.
    mark = getattr(error, "problem_mark", None)
    if mark:
        return (
            f"{mark.name}, line {mark.line + 1}, is not valid YAML; check its indentation (spaces, no tabs), brackets "
            "and quotes, and that no name occurs twice"
        )
    text = " ".join(str(error).split())
    # Hydra's messages repeat the arguments, which may hold secrets.
    for argument, shown in zip(arguments, without_secrets(arguments)):
        text = text.replace(" ".join(argument.split()), shown)
    for pattern, answer in _ANSWERS.items():
        quoted = re.search(pattern, text)
        if quoted:
            return answer.format(*quoted.groups())

    unknown = re.search(r"(?:Could not override|config group) '([^']+)'", text)
    if unknown:
        # For train={epochs:3,foo:1} the message names only train; the error's cause names train.foo.
        name = unknown[1]
        key = getattr(error.__cause__, "full_key", None) or ""
        return _unknown_setting(key if key.startswith(f"{name}.") else name, arguments, compose)
    choice = re.search(r"Could not (?:find|load) '([^'/]+)/([^']*)'", text)
    if choice:
        return _unknown_choice(choice[1], choice[2], arguments)
    if "Config group override" in text or isinstance(error, OSError):
        # For a value that is not a string, such as null, Hydra's message has only its type. An
        # OSError comes from a value that is too long for a file name.
        for argument in arguments:
            group, _, name = argument.lstrip("+~").partition("=")
            if group in ALL_GROUPS and name not in _choice_names(group, arguments):
                return _unknown_choice(group, name, arguments)

    (refused,) = without_secrets([getattr(error, "override", "")])
    if refused:
        return _quoting_advice(refused)

    setting = getattr(error, "full_key", None)
    if setting:
        reason = str(error).partition("\n")[0].rpartition(": ")[2].strip('"')
        return f"{setting} cannot be resolved: {reason}; fix the reference, or give {setting}=VALUE"
    return f"the settings cannot be composed: {text}; see --help"


def _quoting_advice(argument: str) -> str:
    name, _, value = argument.partition("=")
    # The argument may be a misspelt notify= with a secret in its address.
    if "://" in value or len(value) > _MAX_QUOTED:
        value = "..."
    return f"{name}={value} has a character that is special to Hydra; put it in quotes: \"{name}='{value}'\""


def _unknown_choice(group: str, name: str, arguments: list[str]) -> str:
    names = _choice_names(group, arguments)
    match = closest(name, names)
    advice = "--help describes them"
    if match:
        advice = f"did you mean {group}={match}?"
    # A capital letter suggests a network of keras.applications, such as ResNet50.
    if group == "model" and name[:1].isupper():
        advice += f" (for a network of keras.applications: model=application model.name={name})"
    return f"{group}={name} is not one of {', '.join(names)}; {advice}"


def _unknown_setting(name: str, arguments: list[str], compose: Compose) -> str:
    """Explains that the chosen groups have no such setting, and what to write."""
    chosen = [argument for argument in arguments if _CHOICE.fullmatch(argument)]
    chosen += [f"--config-dir={folder}" for folder in config_dirs(arguments)]
    tree = {}
    # If there is nothing but choices, they are what failed, and composing
    # them again would fail too.
    if chosen != arguments:
        tree = compose(chosen)
    # The innermost group of settings on the way to the name.
    parent = ""
    group = tree
    for part in name.split("."):
        if not isinstance(group.get(part), dict):
            break
        group = group[part]
        parent = f"{parent}.{part}".lstrip(".")

    # Leaves out Hydra's own keys, such as _target_.
    known = [other for other in flatten(tree) if "._" not in other]
    inside = [other for other in known if other.startswith(f"{parent}.")]
    match = same_meaning(name, inside or known)
    hint = match and f"did you mean '{match}'?"
    hint = hint or _owners_advice(name, tree, arguments)
    hint = hint or _advice_on(name, inside if "." in parent else [*known, *ALL_GROUPS])
    # Only groups are open to new settings; all other sections are declared in the schema.
    if hint is None and parent and name.partition(".")[0] in (*GROUPS, *SEVERAL):
        present = ", ".join(part for part in group if not part.startswith("_"))
        hint = f"{parent} has {present or 'no settings'}; add a new one with a plus: +{name}=VALUE"
    return f"unknown setting '{name}'; {hint or nearest(name, inside or [*tree])}"


def _owners_advice(name: str, tree: Settings, arguments: list[str]) -> str | None:
    """Names the choices that have this setting, or a synonym of it; None if there are none."""
    own_group, dot, _ = name.partition(".")
    for candidate in (name, *SYNONYMS.get(name.rpartition(".")[2], [])):
        group, _, setting = candidate.partition(".")
        key = setting.partition(".")[0]
        if not key or key in (tree.get(group) or ()) or (dot and group != own_group):
            continue
        choices = [
            path.stem
            for path in choice_files(group, arguments)
            if re.search(rf"(?m)^{re.escape(key)}:", _text(path))
        ]
        if choices:
            owners = f"{group}={', '.join(choices)}"
            return (
                f"{candidate} is a setting of {owners} alone; choose one of these, or leave it out"
            )
    return None


def _advice_on(name: str, known: list[str]) -> str | None:
    """Returns advice on what a wrong name most likely stands for; None if no name is similar."""
    for pattern, advice in _ADVICE.items():
        if re.fullmatch(pattern, name.rpartition(".")[2]):
            return advice
    match = closest(name, known)
    return match and f"did you mean '{match}'?"


def _text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace")


def _choice_names(group: str, arguments: list[str]) -> list[str]:
    return sorted(path.stem for path in choice_files(group, arguments))
