"""Rewrites a script from Keras 2 to Keras 3 in passes, and collects the lines that are left to decide."""

import ast
import difflib
import re
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import MetadataWrapper

from hvtrain.errors import ConfigError
from hvtrain.migrate.arguments import Arguments
from hvtrain.migrate.file_names import FileNames, Literals
from hvtrain.migrate.names import rename, without_unused
from hvtrain.migrate.parsing import apply, imports_in
from hvtrain.migrate.pinning import Pinning
from hvtrain.migrate.undecided import undecided

_HOROVOD = ("horovod.tensorflow.keras", "horovod.keras", "horovod.tensorflow", "hvtrain.keras")
# Signs of graph mode, in which the low-level horovod.tensorflow still works.
_GRAPH_MODE = re.compile(
    r"\b(BroadcastGlobalVariablesHook|MonitoredTrainingSession|tf\.estimator"
    r"|(GradientDescent|Adam|Momentum|Adagrad|RMSProp)Optimizer)\b"
)


@dataclass(frozen=True)
class Rewritten:
    """A migrated script.

    Attributes:
        old: The script as it was.
        text: The new script.
        undecided: Lines left to decide: the number in the new text, and what to do.
    """

    old: str
    text: str
    undecided: tuple[tuple[int, str], ...]

    def diff(self, name: str) -> list[str]:
        old = self.old.splitlines(keepends=True)
        new = self.text.splitlines(keepends=True)
        return list(difflib.unified_diff(old, new, name, f"{name} (migrated)"))

    def undecided_in_old(self) -> list[tuple[int, str]]:
        """The same lines by number in the old text."""
        matcher = difflib.SequenceMatcher(None, self.old.splitlines(), self.text.splitlines(), autojunk=False)
        opcodes = matcher.get_opcodes()

        def old_line(number: int) -> int:
            for _, old_start, old_end, new_start, new_end in opcodes:
                if new_start < number <= new_end:
                    return max(1, min(old_start + number - new_start, old_end))
            raise AssertionError("the spans cover all lines")

        return [(old_line(number), text) for number, text in self.undecided]


def migrate(text: str, name: str = "script") -> Rewritten:
    """Rewrites a script for Keras 3.

    Args:
        text: The script.
        name: Of the file, for messages.

    Raises:
        ConfigError: It is not Python.
    """
    try:
        ast.parse(text)
        module = cst.parse_module(text)
    except (SyntaxError, ValueError, cst.ParserSyntaxError) as error:
        # Errors of Python and of libcst have other attributes.
        line = getattr(error, "lineno", None) or getattr(error, "raw_line", None)
        reason = getattr(error, "msg", None) or getattr(error, "message", None) or error
        where = f"{name}, line {line}" if line else name
        raise ConfigError(f"{where} is not Python: {reason}; fix it first") from error

    alias = _alias(module)
    uses_horovod = bool(alias)
    is_graph = bool(_GRAPH_MODE.search(text))
    new = text
    if uses_horovod and not is_graph:
        new = without_unused(text, apply(text, Pinning(text, alias)))

    # Names first: the other passes know the names of Keras 3 only.
    new = rename(new, keeps_horovod=is_graph)
    new = apply(new, Arguments(new, uses_horovod))
    # Both passes need the same nodes, so they share a tree.
    wrapper = MetadataWrapper(cst.parse_module(new), unsafe_skip_copy=True)
    literals = Literals()
    wrapper.visit(literals)
    new = wrapper.visit(FileNames(literals)).code
    return Rewritten(text, new, tuple(undecided(new, uses_horovod, is_graph)))


def _alias(module: cst.Module) -> str:
    """The script's name for Horovod's Keras interface; empty if it does not import it."""
    aliases = (item.alias or item.name for _, item in imports_in(module) if item.name in _HOROVOD)
    return next(aliases, "")
