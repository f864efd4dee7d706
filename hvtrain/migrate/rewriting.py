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
from hvtrain.migrate.parsing import apply
from hvtrain.migrate.pinning import Pinning
from hvtrain.migrate.undecided import undecided

# Signs of graph mode, in which the low-level horovod.tensorflow still works.
_GRAPH_MODE = re.compile(
    r"\b(BroadcastGlobalVariablesHook|MonitoredTrainingSession|tf\.estimator"
    r"|(GradientDescent|Adam|Momentum|Adagrad|RMSProp)Optimizer)\b"
)


@dataclass(frozen=True)
class Rewritten:
    """The old and the new text, and the lines left to decide, by number in the new text."""

    old: str
    text: str
    undecided: tuple[tuple[int, str], ...]

    def diff(self, name: str) -> list[str]:
        old, new = self.old.splitlines(keepends=True), self.text.splitlines(keepends=True)
        return list(difflib.unified_diff(old, new, name, f"{name} (migrated)"))

    def undecided_in_old(self) -> list[tuple[int, str]]:
        """The same lines by number in the old text."""
        matcher = difflib.SequenceMatcher(None, self.old.splitlines(), self.text.splitlines(), autojunk=False)
        spans = [(new, end, old, last) for _, old, last, new, end in matcher.get_opcodes()]

        def line(number: int) -> int:
            new, _, old, last = next(span for span in spans if span[0] < number <= span[1])
            return max(1, min(old + number - new, last))

        return [(line(number), text) for number, text in self.undecided]


def migrate(text: str, name: str = "script") -> Rewritten:
    """The script for Keras 3. name: of the file, for messages. Raises ConfigError if it is not Python."""
    try:
        tree = ast.parse(text)
        cst.parse_module(text)
    except (SyntaxError, ValueError, cst.ParserSyntaxError) as error:
        line = getattr(error, "lineno", None) or getattr(error, "raw_line", None)
        what = getattr(error, "msg", None) or getattr(error, "message", None) or error
        place = f", line {line}" if line else ""
        raise ConfigError(f"{name}{place} is not Python: {what}; fix it first") from error
    alias = _alias(tree)
    new, is_graph = text, bool(_GRAPH_MODE.search(text))
    if alias and not is_graph:
        new = without_unused(text, apply(text, Pinning(text, alias)))
    new = rename(new, keeps_horovod=is_graph)
    new = apply(new, Arguments(new, bool(alias)))
    found = Literals()
    wrapper = MetadataWrapper(cst.parse_module(new), unsafe_skip_copy=True)
    wrapper.visit(found)
    new = wrapper.visit(FileNames(found)).code
    return Rewritten(text, new, tuple(undecided(new, bool(alias), is_graph)))


def _alias(tree: ast.Module) -> str:
    """The script's name for Horovod's Keras interface; empty if it does not import it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = f"{module}{alias.name}"
                if name in ("horovod.tensorflow.keras", "horovod.keras", "horovod.tensorflow", "hvtrain.keras"):
                    return alias.asname or (alias.name if module else name)
    return ""
