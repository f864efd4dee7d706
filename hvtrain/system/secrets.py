"""Recognizes secrets by their names, and addresses with a password in them: postgres://me:secret@host/."""

import re
from collections.abc import Sequence
from typing import Any

from hvtrain.system import addresses

SECRET = re.compile(r"SECRET|TOKEN|PASS|PWD|CREDENTIAL|PRIVATE|NOTIFY|KEY(?!\w)|_KEY_", re.IGNORECASE)
# Settings that only sound like one: dataset.image_key names a feature of a record.
_HARMLESS = re.compile(r"TOKENIZ|(IMAGE|LABEL)_KEY", re.IGNORECASE)
WITH_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
# NAME: VALUE in the groups of a command line, such as +dataset.storage={key:...,url:...}.
_IN_A_GROUP = re.compile(r"([\w.]+)(['\"]?\s*:\s*)('[^']*'|\"[^\"]*\"|[^,{}\[\]]+)")


def without_passwords(text: str) -> str:
    """A text, such as an error's, with *** in place of what gives access to the addresses in it.

    >>> without_passwords("no answer from https://me:hunter2@host/runs")
    'no answer from https://***@host/runs'
    """
    return WITH_PASSWORD.sub("://***@", text)


def redacted(value: Any, name: str = "") -> Any:
    """A copy of a setting, or of a tree of settings, with *** in place of each text that is a secret.

    >>> redacted({"api_key": "hunter2", "image_key": "image", "backward_passes": 2, "url": "https://me:hunter2@host/"})
    {'api_key': '***', 'image_key': 'image', 'backward_passes': 2, 'url': '***'}
    """
    if isinstance(value, dict):
        return {key: redacted(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [redacted(item, name) for item in value]
    sounds_secret = SECRET.search(name) and not _HARMLESS.search(name)
    return "***" if isinstance(value, str) and (sounds_secret or WITH_PASSWORD.search(value)) else value


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command for a record, without the addresses of notices.

    >>> without_secrets(["model=cnn", "dataset.api_key=hunter2", "notify=mailto://me:hunter2@host", "-cd"])
    ['model=cnn', 'dataset.api_key=***', '-cd']
    >>> without_secrets(["+dataset.storage={key: hunter2, bucket: images}"])
    ['+dataset.storage={key: ***, bucket: images}']
    """
    parts = [one.partition("=") for one in addresses.take(words)[0]]
    return [f"{name}{equals}{_in_word(value, name)}" if equals else redacted(name) for name, equals, value in parts]


def _in_word(value: str, name: str) -> str:
    found: str = redacted(value, name)
    if "{" not in found:
        return found
    return _IN_A_GROUP.sub(lambda one: f"{one[1]}{one[2]}{redacted(one[3], one[1])}", found)
