"""Finds the lines of a migrated script that a person must decide on, with advice for each."""

import re
from collections import Counter

import libcst as cst
import libcst.matchers as m
from libcst import Call

from hvtrain.migrate.file_names import WEIGHTS, FilePaths, outdated_reads
from hvtrain.migrate.parsing import (
    HVTRAIN,
    argument,
    code_of,
    dotted,
    imports,
    method_of,
    names_used,
    parse,
)
from hvtrain.migrate.tables import (
    HVTRAIN_KERAS,
    REMOVED_ARGUMENTS,
    REMOVED_METHODS,
    TENSORFLOW,
    advice,
    entries,
    exists,
    members,
    nearest,
)

_WRITING_CALLBACKS = ("ModelCheckpoint", "TensorBoard", "CSVLogger", "BackupAndRestore")
# Modules of Keras that TensorFlow loads lazily, so that its files do not import them.
_LAZY_MODULES = ("keras", "initializers", "losses", "metrics", "optimizers")
# Callbacks that change the training depending on the logs, so all ranks must have them.
_STEERING_CALLBACKS = ("EarlyStopping", "ReduceLROnPlateau")
# Ways to reduce gradients without naming DistributedOptimizer; hvd.load_model wraps the saved
# optimizer.
_OTHER_REDUCTIONS = ("GradientTape", "allreduce", "load_model")
_REDUCTIONS = ("DistributedOptimizer", *_OTHER_REDUCTIONS)
_TRAINS_ALONE = "each rank trains alone; compile the model with hvd.DistributedOptimizer(optimizer)"
_BROADCASTS = ("BroadcastGlobalVariables", "broadcast_variables", "broadcast_model", "KerasState")
_WEIGHT_LISTS = re.compile(r"(weights|variables|vars)(\(\))?\)*$")
# A dict of arguments in which lr is set.
_SETS_LR = re.compile(r"(\{|dict\().*\blr['\"]?\s*[:=]", re.DOTALL)
# Keras's own names of weights. Any other text that a script looks for in a weight's name was part
# of the layer's name.
_WEIGHT_NAMES = re.compile(r"\w*(kernel|bias|gamma|beta|moving_mean|moving_variance|embeddings)")


def find_undecided(text: str, uses_horovod: bool, is_graph: bool) -> list[tuple[int, str]]:
    """Finds the lines of a migrated script that a person must decide on.

    Args:
        text: The script.
        uses_horovod: True if the script trains its models with Horovod.
        is_graph: True for a script in TensorFlow 1's graph mode.

    Returns:
        Pairs of a line number and what to do there, in order.
    """
    visitor = _Undecided(text, uses_horovod, is_graph)
    parse(text).visit(visitor)
    return sorted(visitor.lines)


class _Undecided(FilePaths):
    def __init__(self, text: str, uses_horovod: bool, is_graph: bool) -> None:
        super().__init__()
        # A set, since a call may be reported for several of its arguments.
        self.lines: set[tuple[int, str]] = set()
        self.text = text
        self.uses_horovod = uses_horovod
        self.broadcasts = any(name in text for name in _BROADCASTS)
        self.reduces = any(name in text for name in _REDUCTIONS)
        # In graph mode, optimizers still have the removed methods.
        self.methods = {} if is_graph else REMOVED_METHODS
        # A stack with an entry for each enclosing condition: whether it tests the rank.
        self._conditions: list[bool] = []
        # Variables that hold the result of such a test, and how often each name is used under such a
        # condition.
        self._rank_tests: set[str] = set()
        self._uses_on_rank_0: Counter[str] = Counter()
        self._names = names_used(text)
        # The name assigned by the enclosing statement; "" outside an assignment.
        self._target = ""
        # Each new callback: its call, its class, the variable that holds it, and whether it is
        # under such a condition.
        self._callbacks: list[tuple[Call, str, str, bool]] = []
        # Loop variables that iterate over a model's weights.
        self._weights: set[str] = set()

    def report(self, node: cst.CSTNode, text: str) -> None:
        self.lines.add((self.line_of(node), text))

    def visit_If(self, node: cst.If | cst.IfExp) -> None:
        # `if hvd.rank() == 0:` around a call, or `callbacks = [...] if hvd.rank() == 0 else []`
        tests_rank = "rank()" in code_of(node.test) or any(
            code_of(name) in self._rank_tests for name in m.findall(node.test, m.Name())
        )
        self._conditions.append(tests_rank)

    def leave_If(self, original_node: cst.If | cst.IfExp) -> None:
        self._conditions.pop()

    def visit_Assign(self, node: cst.Assign) -> None:
        super().visit_Assign(node)
        self._target = dotted(node.targets[0].target)
        if isinstance(node.value, cst.Comparison) and "rank()" in code_of(node.value):
            self._rank_tests.add(self._target)

    def leave_Assign(self, original_node: cst.Assign) -> None:
        self._target = ""

    def visit_Name(self, node: cst.Name) -> None:
        self._uses_on_rank_0[node.value] += any(self._conditions)

    visit_IfExp = visit_If
    leave_IfExp = leave_If

    def visit_Import(self, node: cst.Import | cst.ImportFrom) -> bool:
        if not isinstance(node.names, cst.ImportStar):
            for alias, item in zip(node.names, imports(node)):
                self._check_name(alias, item.name)
        return False  # The names have been checked, so the parts of the statement are not visited.

    visit_ImportFrom = visit_Import

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        name = self.imported(node)
        if name:
            self._check_name(node, name)
        return not dotted(node)  # A dotted name is checked as a whole.

    def _check_name(self, node: cst.CSTNode, name: str) -> None:
        # A name left in tf.keras gets the same advice: tf.keras's set_value, for example, does
        # not work on variables of Keras 3.
        fix = advice(name) or advice(name.removeprefix("tensorflow."))
        if name.startswith("keras."):
            if not exists(name):
                suggestion = nearest(name)
                if suggestion and not fix:
                    fix = f"did you mean {suggestion}?"
                self.report(node, f"Keras 3 has no {name}; {fix or 'replace it'}")
        elif name.startswith(f"{HVTRAIN}.") and name.split(".")[2] not in members(HVTRAIN_KERAS):
            own_name = name.removeprefix(f"{HVTRAIN}.")
            self.report(node, f"{HVTRAIN} has no {own_name}; {fix or 'remove it'}")
        elif fix:
            self.report(node, f"{name}: {fix}")
        elif (
            name.startswith("tensorflow.")
            and name.split(".")[1] not in _LAZY_MODULES
            and not exists(name, TENSORFLOW)
        ):
            self.report(node, f"TensorFlow 2 has no {name}; replace it")

    def visit_For(self, node: cst.For | cst.CompFor) -> None:
        # `for v in model.trainable_variables`, or the same in a comprehension
        if _WEIGHT_LISTS.search(code_of(node.iter)):
            self._weights |= {code_of(name) for name in m.findall(node.target, m.Name())}

    visit_CompFor = visit_For

    def _check_weight_name(self, node: cst.Comparison | Call) -> None:
        """Reports code that looks for the name of a layer in the name of a weight."""
        # Looking for a weight's own name, such as kernel or bias, still works.
        texts = [code_of(text).strip("'\"") for text in m.findall(node, m.SimpleString())]
        if all(_WEIGHT_NAMES.fullmatch(text) for text in texts):
            return

        for attribute in m.findall(node, m.Attribute(value=m.Name(), attr=m.Name("name"))):
            name = code_of(attribute).partition(".")[0]
            if name in self._weights:
                self.report(
                    node,
                    f"in Keras 3 {name}.name, such as kernel, lacks the layer's name; use {name}.path",
                )

    visit_Comparison = _check_weight_name

    def visit_Call(self, node: Call) -> None:
        super().visit_Call(node)
        name = self.called(node)
        for removed, fix in entries(REMOVED_ARGUMENTS, name or f".{method_of(node)}").items():
            if argument(node, removed):
                self.report(node, f"{removed}= {fix}")

        # `v.name.startswith("conv")`, or re.search("conv", v.name)
        is_method_of_name = m.matches(
            node.func, m.Attribute(value=m.Attribute(attr=m.Name("name")))
        )
        if is_method_of_name or name.startswith("re."):
            self._check_weight_name(node)
        if name == f"{HVTRAIN}.callbacks.LearningRateWarmupCallback":
            self._check_warmup(node)
        if name.startswith("keras.callbacks."):
            self._callbacks.append(
                (node, name.rpartition(".")[2], self._target, any(self._conditions))
            )
        if name.startswith("keras.optimizers."):
            self._check_optimizer(node)
        is_compiled = re.search(r"jit_compile\s*=\s*True", code_of(node))
        if name == "tensorflow.function" and self.uses_horovod and is_compiled:
            self.report(
                node,
                "XLA cannot compile Horovod's operations; remove jit_compile if this function reduces gradients",
            )
        if not name and method_of(node):
            self._check_method(node)

    def _check_warmup(self, node: Call) -> None:
        """Reports a first argument that may be warmup_epochs, which came first before Horovod 0.20."""
        first = argument(node, "", 0)
        if first is None or argument(node, "warmup_epochs", 1):
            return
        code = dotted(first.value)
        if code and code != "None" and not re.search("lr|rate", code):
            self.report(
                node,
                f"before Horovod 0.20, {code} was warmup_epochs; write initial_lr={code}, or "
                f"initial_lr=None, warmup_epochs={code}",
            )

    def _check_method(self, node: Call) -> None:
        method = method_of(node)
        model = node.func.value
        if method in self.methods:
            self.report(node, f"{method} {self.methods[method]}")
        # In a class that overrides compile, super().compile(**kwargs) only passes arguments on.
        is_super = code_of(model).startswith("super(")
        if method == "compile" and self.uses_horovod and not is_super:
            self._check_compile(node, model)

        # A broadcast anywhere in the script counts, whether in a callback or by hand.
        if method == "fit" and self.uses_horovod:
            if not self.broadcasts:
                self.report(
                    node,
                    "ranks may start with different weights; add hvd.BroadcastGlobalVariablesCallback(0)",
                )
            if not self.reduces:
                self.report(node, _TRAINS_ALONE)

        if method == "save_weights" or code_of(node.func) == "model.save":
            self._report_shared_write(node, "put this call under if hvd.rank() == 0")

    def _check_compile(self, node: Call, model: cst.BaseExpression) -> None:
        if any(arg.star == "**" for arg in node.args):
            self.report(
                node,
                "the arguments of compile are not in the script; they must contain jit_compile=False",
            )
        elif not (
            argument(node, "jit_compile")
            or f"class {code_of(self.compiling_class(model))}(" in self.text
        ):
            self.report(
                node,
                "the script does not show this model's class; add jit_compile=False unless its own compile refuses it",
            )

        # A script that uses DistributedOptimizer for one model may have forgotten it for another.
        optimizer = argument(node, "optimizer", 0)
        trains = self.reduces and self.broadcasts and f"{code_of(model)}.fit(" in self.text
        if optimizer and trains and not any(name in self.text for name in _OTHER_REDUCTIONS):
            calls = [value for value in self._values(optimizer) if isinstance(value, Call)]
            if {self.called(call).rpartition(".")[0] for call in calls} == {"keras.optimizers"}:
                self.report(node, _TRAINS_ALONE)

    def _check_optimizer(self, node: Call) -> None:
        rate = argument(node, "learning_rate", 0)
        if rate and any(
            isinstance(value, Call) and self.called(value) == "tensorflow.Variable"
            for value in self._values(rate)
        ):
            self.report(
                node,
                "Keras 3 does not accept a tf.Variable as a rate; assign to optimizer.learning_rate instead",
            )
        for arg in node.args:
            name = code_of(arg.value)
            is_set = f"{name}['lr']" in self.values or f'{name}["lr"]' in self.values
            if is_set or any(_SETS_LR.match(code_of(value)) for value in self._values(arg)):
                self.report(node, "lr in these arguments is learning_rate in Keras 3; rename it")

    def _values(self, arg: cst.Arg) -> list[cst.BaseExpression]:
        """Returns the argument's value and, if that is a name, the values assigned to it."""
        return [arg.value, *self.values.get(code_of(arg.value), [])]

    def _report_shared_write(self, node: Call, fix: str) -> None:
        if self.uses_horovod and not any(self._conditions):
            self.report(node, f"all ranks would write the same file; {fix}")

    def leave_Module(self, original_node: cst.Module) -> None:
        for call, name, variable, is_on_rank_0 in self._callbacks:
            # If each use but the assignment is guarded, the callback is on rank 0 alone too:
            # `if hvd.rank() == 0: callbacks.append(checkpoint)`.
            num_guarded = self._uses_on_rank_0[variable]
            if num_guarded and num_guarded >= self._names[variable] - 1:
                is_on_rank_0 = True
            if name in _STEERING_CALLBACKS and is_on_rank_0:
                self.report(
                    call,
                    f"{name} on rank 0 alone makes that rank train differently; use it on all ranks",
                )
            if name in _WRITING_CALLBACKS and not is_on_rank_0:
                self._report_shared_write(call, "use this callback on rank 0 only")
        for call in outdated_reads(self):
            self.report(
                call,
                f"this script now writes such files as NAME{WEIGHTS}; load them under that name",
            )
        for call, path, suffix in self.written:
            if suffix == WEIGHTS and not self.literals(path):
                self.report(
                    call,
                    f"the script does not show the name of this file; make sure that it ends in {WEIGHTS}",
                )
