"""Rewrites a script from Keras 2 to Keras 3 in passes, and collects the lines that are left to decide.

One of the passes is here: it puts hvd.pin_gpu() in place of statements that give each rank its GPU.
"""

import ast
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst
import libcst.matchers as m

from hvtrain.errors import ConfigError, in_one_line
from hvtrain.migrate.arguments import Arguments
from hvtrain.migrate.file_names import FileNames, FilePaths
from hvtrain.migrate.names import rename, with_import, without_unused_imports
from hvtrain.migrate.parsing import Pass, apply, code_of, imports_in, names_used, parse
from hvtrain.migrate.undecided import find_undecided

_HOROVOD = ("horovod.tensorflow.keras", "horovod.keras", "horovod.tensorflow", "hvtrain.keras")
# Signs of a script in graph mode, which must keep the low-level horovod.tensorflow.
_GRAPH_MODE = re.compile(
    r"\b(BroadcastGlobalVariablesHook|MonitoredTrainingSession|tf\.estimator"
    r"|(GradientDescent|Adam|Momentum|Adagrad|RMSProp)Optimizer)\b"
)
# tf.config.experimental.set_memory_growth(gpu, True)
_PINNING_CALL = re.compile(
    r"[\w.]*\b(set_memory_growth|set_visible_devices|set_session)\(.*\)", re.DOTALL
)
# gpus = tf.config.list_physical_devices("GPU"), config = tf.compat.v1.ConfigProto()
_PINNING_VALUE = re.compile(
    r"[\w.]*\b(list_physical_devices|ConfigProto|GPUOptions|Session)\(.*\)", re.DOTALL
)
# config.gpu_options.visible_device_list = ..., os.environ["CUDA_VISIBLE_DEVICES"] = ...
_PINNING_TARGET = re.compile(r"\w+\.gpu_options\.\w+|os\.environ\[.CUDA_VISIBLE_DEVICES.\]")


@dataclass(frozen=True)
class MigratedScript:
    """A migrated script.

    Attributes:
        old: The original script.
        text: The new script.
        undecided: Lines left to decide, each as its number in the new text and what to do there.
    """

    old: str
    text: str
    undecided: Sequence[tuple[int, str]]

    def undecided_in_old(self) -> list[tuple[int, str]]:
        """Returns the lines left to decide, with their numbers in the old text."""
        # Not splitlines(), which also splits at form feeds, unlike Python's line numbers.
        old = self.old.split("\n")
        new = self.text.split("\n")
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        lines = []
        for number, text in self.undecided:
            for _, old_start, old_end, new_start, new_end in matcher.get_opcodes():
                if new_start < number <= new_end:
                    old_number = max(1, min(old_start + number - new_start, old_end))
                    lines.append((old_number, text))

        return lines


def migrate(text: str, name: str = "script") -> MigratedScript:
    """Rewrites a script for Keras 3.

    Args:
        text: The script.
        name: The name of the file, for messages.

    Raises:
        ConfigError: The script is not Python.
    """
    try:
        ast.parse(text, name)
        module = cst.parse_module(text)
    except (SyntaxError, ValueError, cst.ParserSyntaxError) as error:
        raise ConfigError(f"{name} is not Python: {in_one_line(error)}; fix it first") from error

    imported = [item for _, item in imports_in(module)]
    # Names may also be imported from Horovod: from horovod.keras import init.
    modules = tuple(f"{name}." for name in _HOROVOD)
    uses_horovod = any(f"{item.name}.".startswith(modules) for item in imported)
    # The name by which the script imports Horovod itself; empty if it does not.
    alias = next((item.alias or item.name for item in imported if item.name in _HOROVOD), "")
    is_graph = bool(_GRAPH_MODE.search(text))
    new = text
    if alias and not is_graph:
        new = without_unused_imports(text, apply(text, Pinning(text, alias)))

    # Names come first: the other passes know only the names of Keras 3.
    new = rename(new, keeps_horovod=is_graph)
    arguments = Arguments(new, uses_horovod)
    new = apply(new, arguments)
    if arguments.needs_keras:
        new = with_import(new, "import keras")
    # FileNames looks up nodes that FilePaths has found, so both must visit the same tree.
    tree = parse(new)
    paths = FilePaths()
    tree.visit(paths)
    new = tree.visit(FileNames(paths)).code
    return MigratedScript(text, new, find_undecided(new, uses_horovod, is_graph))


class Pinning(Pass):
    """Replaces statements that pin a GPU by hand with one call of pin_gpu.

    Args:
        text: The script.
        alias: The name by which it imports Horovod.
    """

    def __init__(self, text: str, alias: str) -> None:
        super().__init__()
        self.used = names_used(text)
        argument = "by_local_rank=True" if f"{alias}.elastic" in text else ""
        self.line = f"{alias}.pin_gpu({argument})"

    def visit_If(self, node: cst.If | cst.For | cst.Try) -> bool:
        # A statement that only pins is replaced as a whole, so nothing inside it is visited.
        return not _pins(node)

    visit_For = visit_If
    visit_Try = visit_If

    def leave_Module(self, original_node: Any, updated_node: Any) -> Any:
        """Puts one call in place of the statements of a body that pin a GPU."""
        pinning = [statement for statement in updated_node.body if _pins(statement)]
        # If no statement uses the local rank, nothing is pinned: the statements may only let GPU
        # memory grow.
        by_rank = [statement for statement in pinning if "local_rank" in code_of(statement)]
        if not by_rank or self._is_used_elsewhere(pinning):
            return updated_node

        call = cst.parse_statement(self.line).with_changes(leading_lines=pinning[0].leading_lines)
        body = []
        for statement in updated_node.body:
            if statement is by_rank[0]:
                body.append(call)
            elif statement not in pinning:
                body.append(statement)
        return updated_node.with_changes(body=body)

    leave_IndentedBlock = leave_Module

    def _is_used_elsewhere(self, statements: list[cst.BaseStatement]) -> bool:
        """True if other statements use a name that these assign, such as the config of a session."""
        used_here = names_used("".join(map(code_of, statements)))
        assigned = [
            assign.target.value
            for statement in statements
            for assign in m.findall(statement, m.AssignTarget(target=m.Name()))
        ]
        return any(self.used[name] > used_here[name] for name in assigned)


def _pins(statement: cst.BaseStatement) -> bool:
    """True if the statement does nothing but choose GPUs; exception handlers are ignored."""
    if isinstance(statement, cst.SimpleStatementLine):
        return all(_is_pinning(part) for part in statement.body)
    if not isinstance(statement, cst.For | cst.If | cst.Try):
        return False

    inner = list(statement.body.body)
    for name in ("orelse", "finalbody"):
        branch = getattr(statement, name, None)
        if isinstance(branch, cst.If):  # an elif
            return False
        if branch:
            inner += branch.body.body
    return all(map(_pins, inner))


def _is_pinning(part: cst.BaseSmallStatement) -> bool:
    """True for a call or an assignment that only chooses GPUs."""
    if isinstance(part, cst.Expr):
        return bool(_PINNING_CALL.fullmatch(code_of(part)))
    if not isinstance(part, cst.Assign):
        return False

    target = code_of(part.targets[0].target)
    # Without the local rank, CUDA_VISIBLE_DEVICES may be set for another purpose, such as hiding
    # all GPUs.
    value = code_of(part.value)
    is_target = bool(_PINNING_TARGET.fullmatch(target))
    if target.startswith("os.environ"):
        return is_target and "local_rank" in value
    return is_target or bool(_PINNING_VALUE.fullmatch(value))
