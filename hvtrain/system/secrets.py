"""Recognizes secrets by their names, and addresses with a password in them: postgres://me:secret@host/."""

import re
from typing import Any

SECRET = re.compile(r"SECRET|TOKEN(?!IZ)|PASS|PWD|CREDENTIAL|PRIVATE|KEY(?!\w)|_KEY_", re.IGNORECASE)
WITH_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")


def redacted(value: Any, name: str = "") -> Any:
    """A copy of a setting, or of a tree of settings, with *** in place of each text that is a secret.

    >>> redacted({"api_key": "hunter2", "backward_passes": 2, "url": "https://me:hunter2@host/"})
    {'api_key': '***', 'backward_passes': 2, 'url': '***'}
    """
    if isinstance(value, dict):
        return {key: redacted(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [redacted(item, name) for item in value]
    is_secret = isinstance(value, str) and (SECRET.search(name) or WITH_PASSWORD.search(value))
    return "***" if is_secret else value
