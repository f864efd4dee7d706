"""Addresses of notices: those of notify= and HVTRAIN_NOTIFY, which hold secrets. Pure."""

import re
from collections.abc import Mapping, Sequence

VARIABLE = "HVTRAIN_NOTIFY"
_WORD = re.compile(r"\+{0,2}notify=(.*)", re.DOTALL)
_BEFORE_AN_ADDRESS = re.compile(r"[\s,]+(?=['\"]?[A-Za-z][\w.+-]*://)")
_SCHEME = re.compile(r"[A-Za-z][\w.+-]{0,30}(?=://)")


def split(text: str) -> list[str]:
    """The addresses in a text, apart by commas or blanks, in brackets and quotes or not.

    >>> split("[mailto://me:hunter2@host?to=a@b.org,c@d.org, 'json://localhost']")
    ['mailto://me:hunter2@host?to=a@b.org,c@d.org', 'json://localhost']
    >>> split("[]")
    []
    """
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    return [one.strip("'\" \t\r\n,") for one in _BEFORE_AN_ADDRESS.split(text) if one.strip()]


def chosen(setting: str | list[str] | None, environ: Mapping[str, str]) -> list[str]:
    """The addresses of the setting notify; those of the variable if it is null.

    >>> chosen(None, {"HVTRAIN_NOTIFY": "json://here json://there"}), chosen([], {"HVTRAIN_NOTIFY": "json://here"})
    (['json://here', 'json://there'], [])
    """
    if isinstance(setting, list):
        return setting
    return split(environ.get(VARIABLE, "") if setting is None else setting)


def take(words: Sequence[str]) -> tuple[list[str], str | None]:
    """The words of a command line without notify=..., and the last one's value, if there is one.

    >>> take(["model=mlp", "notify=json://localhost?a=b"])
    (['model=mlp'], 'json://localhost?a=b')
    """
    found = [(word, _WORD.fullmatch(word)) for word in words]
    return [word for word, match in found if not match], next((match[1] for _, match in found[::-1] if match), None)


def shown(address: str) -> str:
    """An address without its secrets.

    >>> shown("slack://TokenA/TokenB/TokenC"), shown("hunter2")
    ('slack://***', '***')
    """
    scheme = _SCHEME.match(address)
    return f"{scheme[0]}://***" if scheme else "***"
