"""Finds the lines of a migrated script that a person must decide, and why."""

import re
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper

from hvtrain.migrate.file_names import WEIGHTS, Literals, unresolved
from hvtrain.migrate.parsing import HVTRAIN, argument, code_of, dotted, is_number, method_of
from hvtrain.migrate.tables import (
    REMOVED_ARGUMENTS,
    REMOVED_METHODS,
    advice,
    entries,
    exists,
    names_of_hvtrain,
    nearest,
)

_WRITERS = ("ModelCheckpoint", "TensorBoard", "CSVLogger", "BackupAndRestore")
_BROADCASTS = ("BroadcastGlobalVariables", "broadcast_variables", "broadcast_model", "KerasState")
# Methods of Keras 2's optimizers.
_NEVER_CALLED = ("_resource_apply_dense", "_resource_apply_sparse", "_create_slots", "get_updates")
_LISTS_OF_WEIGHTS = re.compile(r"(weights|variables|vars)(\(\))?\)*$")
# The names of Keras's own weights. Everything else that stood in a name came from the layer.
_NAMES_OF_WEIGHTS = re.compile(r"\w*(kernel|bias|gamma|beta|moving_mean|moving_variance|embeddings)")


def undecided(text: str, uses_horovod: bool, is_graph: bool) -> list[tuple[int, str]]:
    """Finds the lines of a migrated script.

    Args:
        text: The script.
        uses_horovod: True if Horovod trains its models.
        is_graph: True for a script in graph mode of TensorFlow 1.

    Returns:
        Line numbers, in order, with what to do there.
    """
    visitor = _Undecided(text, uses_horovod, is_graph)
    MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True).visit(visitor)
    return sorted(set(visitor.lines))


class _Undecided(Literals):
    def __init__(self, text: str, uses_horovod: bool, is_graph: bool) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []
        self.uses_horovod = uses_horovod
        self.broadcasts = any(name in text for name in _BROADCASTS)
        # Optimizers of graph mode still have these.
        self.methods = {} if is_graph else REMOVED_METHODS
        # How many of the surrounding conditions ask for a rank.
        self._on_rank_0 = 0
        # Names that loops give to the weights of a model.
        self._weights: set[str] = set()
        self._functions = set(re.findall(r"^\s*def (\w+)", text, re.MULTILINE))

    def report(self, node: cst.CSTNode, text: str) -> None:
        self.lines.append((self.line_of(node), text))

    def visit_If(self, node: cst.If | cst.IfExp) -> None:
        # `if hvd.rank() == 0:` around a call, or `callbacks = [...] if hvd.rank() == 0 else []`
        self._on_rank_0 += "rank()" in code_of(node.test)

    def leave_If(self, original_node: Any, updated_node: Any) -> Any:
        self._on_rank_0 -= "rank()" in code_of(original_node.test)
        return updated_node

    visit_IfExp = visit_If
    leave_IfExp = leave_If

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        if not isinstance(node.names, cst.ImportStar) and not node.relative:
            for alias in node.names:
                self._name(alias, f"{dotted(node.module)}.{dotted(alias.name)}")
        return False  # The names inside have been looked at.

    def visit_Import(self, node: cst.Import) -> bool:
        for alias in node.names:
            self._name(alias, dotted(alias.name))
        return False

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        name = self.imported(node)
        if name:
            self._name(node, name)
        return not dotted(node)  # A chain of names is one name.

    def _name(self, node: cst.CSTNode, name: str) -> None:
        fix = advice(name)
        if name.startswith("keras."):
            if not exists(name):
                near = nearest(name)
                if near and not fix:
                    fix = f"did you mean {near}?"
                self.report(node, f"Keras 3 has no {name}; {fix or 'replace it'}")
        elif name.startswith(f"{HVTRAIN}.") and name.split(".")[2] not in names_of_hvtrain():
            self.report(
                node,
                f"hvtrain.keras has no {name.removeprefix(f'{HVTRAIN}.')}; {fix or 'remove it'}",
            )
        elif fix:
            self.report(node, f"{name}: {fix}")

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        name = node.name.value
        if name in _NEVER_CALLED and node.params.params:
            self.report(
                node,
                f"Keras 3 never calls {name}; override build and update_step(gradient, variable, learning_rate)",
            )

    def visit_For(self, node: cst.For | cst.CompFor) -> None:
        # `for v in model.trainable_variables`, or the same in a comprehension
        if _LISTS_OF_WEIGHTS.search(code_of(node.iter)):
            self._weights |= {code_of(name) for name in m.findall(node.target, m.Name())}

    visit_CompFor = visit_For

    def visit_Comparison(self, node: cst.Comparison) -> None:
        self._name_of_a_weight(node)

    def _name_of_a_weight(self, node: cst.Comparison | cst.Call) -> None:
        """Reports where the name of a weight is searched for that of a layer."""
        # Names of Keras's own weights (kernel, bias) mean the same as before.
        texts = [code_of(text).strip("'\"") for text in m.findall(node, m.SimpleString())]
        if all(_NAMES_OF_WEIGHTS.fullmatch(text) for text in texts):
            return

        for attribute in m.findall(node, m.Attribute(value=m.Name(), attr=m.Name("name"))):
            name = code_of(attribute).partition(".")[0]
            if name in self._weights:
                self.report(
                    node,
                    f"on Keras 3 {name}.name is kernel or gamma, without the layer; use {name}.path",
                )

    def visit_Call(self, node: cst.Call) -> None:
        super().visit_Call(node)
        name = self.imported(node.func)
        for removed, fix in entries(REMOVED_ARGUMENTS, name, method_of(node)).items():
            if argument(node, removed):
                self.report(node, f"{removed}= {fix}")

        # `v.name.startswith("conv")`, or re.search("conv", v.name)
        is_method_of_name = m.matches(node.func, m.Attribute(value=m.Attribute(attr=m.Name("name"))))
        if is_method_of_name or name.startswith("re."):
            self._name_of_a_weight(node)
        if name == f"{HVTRAIN}.callbacks.LearningRateScheduleCallback":
            self._schedule(node)
        if name.startswith("keras.callbacks.") and name.rpartition(".")[2] in _WRITERS:
            self._written_by_all(node, "use this callback on rank 0 only")
        if not name and isinstance(node.func, cst.Attribute):
            self._method(node, node.func)

    def _schedule(self, node: cst.Call) -> None:
        """Reports a multiplier that may be a number, which was a factor, and not yet the base of a power."""
        initial_lr = argument(node, "initial_lr", 0)
        multiplier = argument(node, "multiplier", 1)
        if initial_lr is None or multiplier is None or not m.matches(initial_lr.value, m.Name("None")):
            return

        code = code_of(multiplier.value)
        is_function = isinstance(multiplier.value, cst.Lambda) or code in self._functions
        if not is_function and not is_number(multiplier.value):
            self.report(
                node,
                f"if {code} is a number, older versions took it as a factor; write lambda epoch: {code}",
            )

    def _method(self, node: cst.Call, func: cst.Attribute) -> None:
        method = func.attr.value
        if method in self.methods:
            self.report(node, f"{method} {self.methods[method]}")
        if method == "compile" and self.uses_horovod and any(arg.star == "**" for arg in node.args):
            self.report(
                node,
                "the arguments of compile are not in the script; they must contain jit_compile=False",
            )

        # A broadcast anywhere in the script counts, in a callback or by hand.
        if method == "fit" and self.uses_horovod and not self.broadcasts:
            self.report(
                node,
                "ranks may start with different weights; add hvd.BroadcastGlobalVariablesCallback(0)",
            )

        saves_model = method == "save" and m.matches(func.value, m.Name("model"))
        if method == "save_weights" or saves_model:
            self._written_by_all(node, "put it under if hvd.rank() == 0")

    def _written_by_all(self, node: cst.Call, fix: str) -> None:
        if self.uses_horovod and not self._on_rank_0:
            self.report(node, f"all ranks would write the same file; {fix}")

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        for call in unresolved(self):
            self.report(
                call,
                f"Keras 3 needs a file name that ends in {WEIGHTS}, and the name is not in the script",
            )
        return updated_node
