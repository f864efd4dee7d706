"""Settings as words of a command line that Hydra parses."""

import json
import re
from typing import Any


def word(name: str, value: Any) -> str:
    """The setting as Hydra reads it on a command line.

    >>> word("train.ema", None), word("model.hidden", [64, 32]), word("optimizer", "sgd"), word("a.b", "it's 1")
    ('train.ema=null', 'model.hidden=[64,32]', 'optimizer=sgd', "a.b='it\\\\'s 1'")
    """
    return f"{name}={_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z][\w./-]*", value):
        # A backslash is special to Hydra before a quote alone.
        return "'" + re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + (found[2] and r"\'"), value) + "'"
    return value if isinstance(value, str) else json.dumps(value)
