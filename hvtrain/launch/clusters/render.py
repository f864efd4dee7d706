"""Renders the files of every kind of cluster from Jinja2 templates: conf/cluster/, or a folder of the user's own."""

import shlex
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml

from hvtrain.config.compose import CONFIGS
from hvtrain.errors import ConfigError


def render(name: str, folders: Sequence[Path], values: dict[str, Any]) -> str:
    """The text of a file, from the first cluster/NAME.j2 in the folders and then in conf/. Raises ConfigError."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder / "cluster" for folder in (*folders, CONFIGS)]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(quote=quote, yaml=yaml_text)
    try:
        return environment.get_template(f"{name}.j2").render(values)
    except Exception as error:  # A template is the user's input and can fail in any way.
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"template {place.filename}, line {place.lineno}: {' '.join(str(error).split())}; fix the template"
        ) from error


def quote(words: str | Sequence[str]) -> str:
    """One word, or several, quoted for the shell.

    >>> quote("a b"), quote(["a b", "$c"])
    ("'a b'", "'a b' '$c'")
    """
    return shlex.quote(words) if isinstance(words, str) else shlex.join(words)


def yaml_text(value: object) -> str:
    """A text as a double-quoted scalar of YAML, on one line.

    >>> yaml_text("yes"), yaml_text("a: b #c")
    ('"yes"', '"a: b #c"')
    """
    text: str = yaml.dump(str(value), Dumper=yaml.SafeDumper, default_style='"', width=float("inf"), allow_unicode=True)
    return text.strip()
