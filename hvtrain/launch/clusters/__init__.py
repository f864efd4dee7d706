"""Files for schedulers: one module for each with its settings and checks; the files come from conf/cluster/."""

import re
from collections.abc import Iterable
from typing import Any

from hvtrain.errors import ConfigError


def check_texts(settings: Any, names: Iterable[str], pattern: str, needed: str) -> None:
    """Raises ConfigError for a setting that does not match the pattern; null always does."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not re.fullmatch(pattern, value):
            raise ConfigError(f"cluster.{name}={' '.join(value.split())} is not {needed}")
