"""The pass that changes arguments of calls: of Keras's classes, of models' methods, of Horovod's callbacks."""

from collections.abc import Mapping, Sequence

import libcst as cst
import libcst.matchers as m

from hvtrain.migrate.parsing import (
    HVTRAIN,
    Pass,
    argument,
    code_of,
    expression,
    is_number,
    keyword,
    method_of,
    with_args,
)
from hvtrain.migrate.tables import ARGUMENTS, RENAMED_METHODS, entries

# Callbacks that set the rate.
SETS_RATES = ("LearningRate", "ReduceLROnPlateau")


class Arguments(Pass):
    """Changes calls.

    Args:
        text: The script.
        uses_horovod: True if Horovod trains the models of this script.
    """

    def __init__(self, text: str, uses_horovod: bool) -> None:
        super().__init__()
        self.uses_horovod = uses_horovod
        self.sets_rates = any(name in text for name in SETS_RATES)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        """Renames optimizer.lr."""
        optimizer = m.Name("optimizer") | m.Name("opt") | m.Attribute(attr=m.Name("optimizer"))
        if m.matches(updated_node, m.Attribute(value=optimizer, attr=m.Name("lr"))):
            return updated_node.with_changes(attr=cst.Name("learning_rate"))
        return updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        name = self.imported(original_node.func)
        if not name:
            return self._method(updated_node)

        call = _with_names(updated_node, entries(ARGUMENTS, name, ""))
        if name.startswith("keras.optimizers.") and not name.startswith("keras.optimizers.schedules."):
            return self._optimizer(call)
        if name == f"{HVTRAIN}.callbacks.LearningRateWarmupCallback" and not argument(call, "initial_lr", 0):
            # Horovod before 0.20 did not have initial_lr; None means the optimizer's rate.
            return with_args(call, [keyword("initial_lr", expression("None")), *call.args])
        if name == f"{HVTRAIN}.callbacks.LearningRateScheduleCallback":
            return _schedule(call)
        return call

    def _optimizer(self, call: cst.Call) -> cst.Call:
        """Drops epsilon=None, which meant the default, and turns decay=, which acted on each step, into a schedule."""
        no_epsilon = m.Arg(keyword=m.Name("epsilon"), value=m.Name("None"))
        args = [arg for arg in call.args if not m.matches(arg, no_epsilon)]
        decay = argument(call, "decay")
        rate = argument(call, "learning_rate", 0)
        if decay is None:
            return with_args(call, args)

        without_decay = [arg for arg in args if arg is not decay]
        if is_number(decay.value) and float(code_of(decay.value)) == 0:
            return with_args(call, without_decay)
        # A callback could not set the rate of a schedule; undecided.py reports it.
        if rate is None or self.sets_rates:
            return with_args(call, args)

        code = f"keras.optimizers.schedules.InverseTimeDecay({code_of(rate.value)}, 1, {code_of(decay.value)})"
        return with_args(call, _replaced(without_decay, rate, expression(code)))

    def _method(self, call: cst.Call) -> cst.BaseExpression:
        # A class that overrides compile or fit passes on the arguments that it got.
        if not isinstance(call.func, cst.Attribute) or m.matches(call.func.value, m.Call(func=m.Name("super"))):
            return call

        method = method_of(call)
        # optimizer.variables() is a property now.
        if method == "variables" and not call.args:
            return call.func
        if method == "compiled_loss" and len(call.args) in (2, 3):
            return _compute_loss(call)
        # fit_generator(g, 100, workers=4) -> fit(x=g, steps_per_epoch=100)
        if method in RENAMED_METHODS:
            method, *order = RENAMED_METHODS[method]
            call = _with_names(_with_keywords(_with_method(call, method), order), {"generator": "x"})

        call = _with_names(call, entries(ARGUMENTS, "", method))
        if method == "compile":
            return self._compile(call)
        return call

    def _compile(self, call: cst.Call) -> cst.Call:
        """Turns XLA off, which cannot compile an operation of Horovod (horovod#2590)."""
        if not self.uses_horovod or any(arg.star for arg in call.args):
            return call
        jit_compile = argument(call, "jit_compile")
        if jit_compile is None:
            return with_args(call, [*call.args, keyword("jit_compile", cst.Name("False"))])
        return with_args(call, _replaced(call.args, jit_compile, cst.Name("False")))


def _replaced(args: Sequence[cst.Arg], old: cst.Arg, value: cst.BaseExpression) -> list[cst.Arg]:
    """The arguments, one of them with another value."""
    return [arg.with_changes(value=value) if arg is old else arg for arg in args]


def _with_method(call: cst.Call, method: str) -> cst.Call:
    return call.with_changes(func=call.func.with_changes(attr=cst.Name(method)))


def _compute_loss(call: cst.Call) -> cst.Call:
    """compiled_loss(y, prediction) becomes compute_loss(y=y, y_pred=prediction), which adds the regularization."""
    if any(arg.keyword and arg.keyword.value != "regularization_losses" for arg in call.args):
        return call
    args = [keyword(name, arg.value) for name, arg in zip(("y", "y_pred"), call.args)]
    return _with_method(with_args(call, args), "compute_loss")


def _with_keywords(call: cst.Call, names: list[str]) -> cst.Call:
    """Passes positional arguments by keyword, but for the first one and those after the last name."""
    args = list(call.args)
    for number, name in enumerate(names[: len(args)]):
        if number and args[number].keyword is None and not args[number].star:
            args[number] = keyword(name, args[number].value)
    return with_args(call, args)


def _with_names(call: cst.Call, new_names: Mapping[str, str | None]) -> cst.Call:
    """Renames and drops arguments by keyword."""
    args: list[cst.Arg] = []
    for arg in call.args:
        name = arg.keyword.value if arg.keyword else ""
        new_name = new_names.get(name, name)
        if new_name == name:
            args.append(arg)
        elif new_name is not None:
            args.append(arg.with_changes(keyword=cst.Name(new_name)))

    return with_args(call, args)


def _schedule(call: cst.Call) -> cst.Call:
    """Adds initial_lr, which Horovod before 0.20 did not have.

    The multiplier came first. A number was a factor, and not yet the base of a power.
    """
    if argument(call, "initial_lr") or not call.args:
        return call

    multiplier = argument(call, "multiplier")
    positional = [arg for arg in call.args if arg.keyword is None]
    if multiplier is None and len(positional) == 1:
        (multiplier,) = positional  # Today's callback needs two.

    is_lambda = bool(positional) and isinstance(positional[0].value, cst.Lambda)
    if multiplier in positional or is_lambda:
        initial_lr = cst.Arg(expression("None"))
    elif multiplier is not None and not positional:
        initial_lr = keyword("initial_lr", expression("None"))
    else:
        return call

    args = list(call.args)
    if multiplier is not None and is_number(multiplier.value):
        args = _replaced(args, multiplier, expression(f"lambda epoch: {code_of(multiplier.value)}"))
    return with_args(call, [initial_lr, *args])
