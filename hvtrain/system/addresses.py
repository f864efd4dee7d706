"""Addresses of notices: those of notify= and HVTRAIN_NOTIFY, which hold secrets. Pure."""

import re
from collections.abc import Mapping, Sequence

VARIABLE = "HVTRAIN_NOTIFY"
_ARGUMENT = re.compile(r"\+{0,2}notify=(.*)", re.DOTALL)
_BEFORE_AN_ADDRESS = re.compile(r"[\s,]+(?=['\"]?[A-Za-z][\w.+-]*://)")
_SCHEME = re.compile(r"[A-Za-z][\w.+-]{0,30}(?=://)")


def split(text: str) -> list[str]:
    """Splits a text into addresses, which commas or blanks separate, with or without brackets and quotes.

    >>> split("[mailto://me:hunter2@host?to=a@b.org,c@d.org, 'json://localhost']")
    ['mailto://me:hunter2@host?to=a@b.org,c@d.org', 'json://localhost']
    >>> split("[]")
    []
    """
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    parts = _BEFORE_AN_ADDRESS.split(text)
    return [part.strip("'\" \t\r\n,") for part in parts if part.strip()]


def chosen(setting: str | list[str] | None, environ: Mapping[str, str]) -> list[str]:
    """The addresses of the setting notify; those of the variable if it is null.

    >>> chosen(None, {"HVTRAIN_NOTIFY": "json://here json://there"}), chosen([], {"HVTRAIN_NOTIFY": "json://here"})
    (['json://here', 'json://there'], [])
    """
    if isinstance(setting, list):
        return setting
    return split(environ.get(VARIABLE, "") if setting is None else setting)


def take(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Removes notify=... from a command line; returns the other arguments and the last one's value, if there is one.

    >>> take(["model=mlp", "notify=json://localhost?a=b"])
    (['model=mlp'], 'json://localhost?a=b')
    """
    others = []
    value = None
    for argument in arguments:
        match = _ARGUMENT.fullmatch(argument)
        if match:
            value = match[1]
        else:
            others.append(argument)
    return others, value


def shown(address: str) -> str:
    """An address without its secrets.

    >>> shown("slack://TokenA/TokenB/TokenC"), shown("hunter2")
    ('slack://***', '***')
    """
    scheme = _SCHEME.match(address)
    return f"{scheme[0]}://***" if scheme else "***"
