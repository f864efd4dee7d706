"""Calls a function on a host by ssh. Only Python is needed there: the text of the function's modules is sent along."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_ANSWER = "hvtrain-answer:"
# Creates the modules that are sent, under their own names, whether or not hvtrain is installed there.
LOADER = f"""
import json, sys, types
modules, (name, function, arguments) = json.load(sys.stdin)
for full_name, text in modules:
    module = sys.modules[full_name] = types.ModuleType(full_name)
    parent, _, leaf = full_name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
    exec(compile(text, full_name, "exec"), module.__dict__)
print("{_ANSWER}", json.dumps(getattr(sys.modules[name], function)(*arguments)))
"""


def request(modules: Sequence[ModuleType], function: str, *arguments: Any) -> str:
    """The input of `python -c LOADER`, which then calls a function of the last module; the others are its imports."""
    packages = sorted({"hvtrain", *(module.__name__.rpartition(".")[0] for module in modules)})
    texts = [(module.__name__, Path(str(module.__file__)).read_text(encoding="utf-8")) for module in modules]
    call = (modules[-1].__name__, function, arguments)
    return json.dumps(([*((package, "") for package in packages), *texts], call))


def answer(output: str) -> Any:
    """The function's result from what `python -c LOADER` printed; None if it is not there.

    The greeting of a login shell may stand before it.
    """
    found = re.search(rf"^{_ANSWER} (.*)$", output, re.MULTILINE)
    return json.loads(found[1]) if found else None
