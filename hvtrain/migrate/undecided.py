"""Finds the lines of a migrated script that a person must decide, and why."""

import re

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider

from hvtrain.migrate.file_names import Literals, unresolved
from hvtrain.migrate.keras_names import exists, names_of_hvtrain, nearest
from hvtrain.migrate.parsing import HVTRAIN, argument, code_of, dotted, is_number
from hvtrain.migrate.renamed import METHODS, advice

_WRITERS = ("ModelCheckpoint", "TensorBoard", "CSVLogger", "BackupAndRestore")
_BROADCASTS = ("BroadcastGlobalVariables", "broadcast_variables", "broadcast_model", "KerasState")
# Methods of Keras 2's optimizers.
_NEVER_CALLED = ("_resource_apply_dense", "_resource_apply_sparse", "_create_slots", "get_updates")
_LISTS_OF_WEIGHTS = re.compile(r"(weights|variables|vars)(\(\))?\)*$")
# The names of Keras's own weights. Everything else that stood in a name came from the layer.
_NAMES_OF_WEIGHTS = re.compile(r"\w*(kernel|bias|gamma|beta|moving_mean|moving_variance|embeddings)")
_GONE = {"sample_weight_mode": "pass sample_weight to fit", "target_tensors": "pass the targets to fit"}


def undecided(text: str, uses_horovod: bool, is_graph: bool) -> list[tuple[int, str]]:
    """Line numbers, in order, with what to do there."""
    wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    found = _Undecided(text, uses_horovod, is_graph)
    wrapper.visit(found)
    return sorted(set(found.lines))


class _Undecided(Literals):
    def __init__(self, text: str, uses_horovod: bool, is_graph: bool) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []
        self.uses_horovod = uses_horovod
        self.broadcasts = any(word in text for word in _BROADCASTS)
        # Optimizers of graph mode still have these.
        self.methods = {} if is_graph else METHODS
        self._on_rank_0 = 0
        self._weights: set[str] = set()  # Names that loops give to the weights of a model.
        self._functions = set(re.findall(r"^\s*def (\w+)", text, re.MULTILINE))

    def say(self, node: cst.CSTNode, text: str) -> None:
        self.lines.append((self.get_metadata(PositionProvider, node).start.line, text))

    def visit_If(self, node: cst.If) -> None:
        self._on_rank_0 += "rank()" in code_of(node.test)

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> cst.If:
        self._on_rank_0 -= "rank()" in code_of(original_node.test)
        return updated_node

    def visit_IfExp(self, node: cst.IfExp) -> None:
        self._on_rank_0 += "rank()" in code_of(node.test)

    def leave_IfExp(self, original_node: cst.IfExp, updated_node: cst.IfExp) -> cst.IfExp:
        self._on_rank_0 -= "rank()" in code_of(original_node.test)
        return updated_node

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        if not isinstance(node.names, cst.ImportStar) and not node.relative:
            for alias in node.names:
                self._name(alias, f"{dotted(node.module)}.{dotted(alias.name)}")
        return False

    def visit_Import(self, node: cst.Import) -> bool:
        for alias in node.names:
            self._name(alias, dotted(alias.name))
        return False

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        if name := self.imported(node):
            self._name(node, name)
        return not dotted(node)

    def _name(self, node: cst.CSTNode, name: str) -> None:
        if name.startswith("keras.") and not exists(name):
            near = nearest(name)
            what = advice(name) or (f"did you mean {near}?" if near else "replace it")
            self.say(node, f"Keras 3 has no {name}; {what}")
        elif name.startswith(f"{HVTRAIN}.") and name.split(".")[2] not in names_of_hvtrain():
            self.say(node, f"hvtrain.keras has no {name.removeprefix(f'{HVTRAIN}.')}; {advice(name) or 'remove it'}")
        elif not name.startswith("keras.") and (what := advice(name)):
            self.say(node, f"{name}: {what}")

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        if (name := node.name.value) in _NEVER_CALLED and node.params.params:
            instead = "override build and update_step(gradient, variable, learning_rate)"
            self.say(node, f"Keras 3 never calls {name}; {instead}")

    def visit_For(self, node: cst.For) -> None:
        self._loop(node)

    def visit_CompFor(self, node: cst.CompFor) -> None:
        self._loop(node)

    def _loop(self, node: cst.For | cst.CompFor) -> None:
        if _LISTS_OF_WEIGHTS.search(code_of(node.iter)):
            self._weights |= {code_of(name) for name in m.findall(node.target, m.Name())}

    def visit_Comparison(self, node: cst.Comparison) -> None:
        self._name_of_a_weight(node)

    def _name_of_a_weight(self, node: cst.Comparison | cst.Call) -> None:
        """Says so where the name of a weight is searched for that of a layer."""
        texts = [code_of(text).strip("'\"") for text in m.findall(node, m.SimpleString())]
        if all(_NAMES_OF_WEIGHTS.fullmatch(text) for text in texts):
            return
        for found in m.findall(node, m.Attribute(value=m.Name(), attr=m.Name("name"))):
            if (named := code_of(found).partition(".")[0]) in self._weights:
                self.say(node, f"on Keras 3 {named}.name is kernel or gamma, without the layer; use {named}.path")

    def visit_Call(self, node: cst.Call) -> None:
        super().visit_Call(node)
        name = self.imported(node.func)
        if m.matches(node.func, m.Attribute(value=m.Attribute(attr=m.Name("name")))) or name.startswith("re."):
            self._name_of_a_weight(node)
        if name == f"{HVTRAIN}.callbacks.LearningRateScheduleCallback":
            self._schedule(node)
        if name.startswith("keras.optimizers.") and argument(node, "decay"):
            self.say(node, "decay= is ignored by Keras 3, and a schedule cannot replace it, because a callback of this "
                     "script sets the rate; put the decay into that callback")  # fmt: skip
        if name.startswith("keras.callbacks.") and name.rpartition(".")[2] in _WRITERS:
            if argument(node, "period"):
                self.say(node, "period= was removed; save_freq counts batches, or is 'epoch'")
            if self.uses_horovod and not self._on_rank_0:
                self.say(node, "all ranks would write the same file; use this callback on rank 0 only")
        if name.startswith("keras.layers.BatchNormalization"):
            for gone in ("renorm", "virtual_batch_size"):
                if argument(node, gone):
                    self.say(node, f"{gone}= was removed from BatchNormalization; leave it out")
        if not name and isinstance(node.func, cst.Attribute):
            self._method(node, node.func)

    def _schedule(self, node: cst.Call) -> None:
        initial, multiplier = argument(node, "initial_lr", 0), argument(node, "multiplier", 1)
        if initial is None or multiplier is None or not m.matches(initial.value, m.Name("None")):
            return
        what = code_of(multiplier.value)
        is_function = isinstance(multiplier.value, cst.Lambda) or what in self._functions
        if not is_function and not is_number(multiplier.value):
            self.say(node, f"if {what} is a number, older versions took it as a factor; write lambda epoch: {what}")

    def _method(self, node: cst.Call, func: cst.Attribute) -> None:
        method = func.attr.value
        if method in self.methods:
            self.say(node, f"{method} {self.methods[method]}")
        if method == "compile":
            for gone, instead in _GONE.items():
                if argument(node, gone):
                    self.say(node, f"{gone}= was removed; {instead}")
            if self.uses_horovod and any(arg.star == "**" for arg in node.args):
                self.say(node, "the arguments of compile are not in the script; they must contain jit_compile=False")
        if method == "fit" and self.uses_horovod and not self.broadcasts:
            self.say(node, "ranks may start with different weights; add hvd.BroadcastGlobalVariablesCallback(0)")
        if method == "save" and argument(node, "save_format"):
            self.say(node, "save_format= was removed; the suffix .keras says it, and model.export writes a SavedModel")
        saves = method in ("save_weights",) or (method == "save" and m.matches(func.value, m.Name("model")))
        if saves and self.uses_horovod and not self._on_rank_0:
            self.say(node, "all ranks would write the same file; put it under if hvd.rank() == 0")

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        for call, suffix in unresolved(self):
            self.say(call, f"Keras 3 needs a file name that ends in {suffix}, and the name is not in the script")
        return updated_node
