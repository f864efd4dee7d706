"""The pass that changes the arguments of calls to Keras classes, model methods and Horovod callbacks."""

import re
from ast import literal_eval
from collections.abc import Mapping

import libcst as cst
import libcst.matchers as m
from libcst import Arg, BaseExpression, Call, parse_expression

from hvtrain.migrate.parsing import (
    HVTRAIN,
    Pass,
    argument,
    code_of,
    dotted,
    is_model_name,
    is_number,
    keyword,
    method_of,
    with_args,
)
from hvtrain.migrate.tables import ARGUMENTS, RENAMED_METHODS, entries

# Callbacks that set the learning rate.
RATE_CALLBACKS = ("LearningRate", "ReduceLROnPlateau")
_BOOLEAN = m.Name("True") | m.Name("False")
# Matches calls such as hvd.allreduce(x, False).
_AVERAGES = m.Call(args=[m.Arg(), m.Arg(_BOOLEAN, keyword=None), m.ZeroOrMore()])
OPTIMIZERS = ("keras.optimizers.", "keras.mixed_precision.LossScaleOptimizer")


class Arguments(Pass):
    """Changes the arguments of calls, and renames methods and attributes that have other names in Keras 3.

    Args:
        text: The script.
        uses_horovod: True if the script trains its models with Horovod.
    """

    def __init__(self, text: str, uses_horovod: bool) -> None:
        super().__init__()
        self.uses_horovod = uses_horovod
        self.sets_rates = any(name in text for name in RATE_CALLBACKS)
        self.clips = "clip_by_" in text
        # True once the script needs `import keras`.
        self.needs_keras = False
        # A stack with an entry for each enclosing class: whether it is an optimizer.
        self._in_optimizer: list[bool] = []

    def visit_Module(self, node: cst.Module) -> None:
        super().visit_Module(node)
        # Parameters of the compile methods that the script's own models define, by class name.
        self.compile_parameters = {
            class_def.name.value: method.params
            for class_def in m.findall(node, m.ClassDef())
            for method in m.findall(class_def, m.FunctionDef(m.Name("compile")))
        }

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._in_optimizer.append(
            any(self.imported(base.value).startswith(OPTIMIZERS) for base in node.bases)
        )

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef:
        self._in_optimizer.pop()
        return updated_node

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        """Renames reset_states in the script's own classes, such as metrics."""
        if self._in_optimizer and updated_node.name.value == "reset_states":
            return updated_node.with_changes(name=cst.Name("reset_state"))
        return updated_node

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> BaseExpression:
        """Renames optimizer.lr to optimizer.learning_rate."""
        is_rate = re.search(r"(^opt|\boptimizer)\.lr$", code_of(updated_node))
        # After opt = parser.parse_args(), opt.lr is an option of the script.
        if is_rate and not dotted(self.compiling_class(updated_node.value)).endswith(".parse_args"):
            return updated_node.with_changes(attr=cst.Name("learning_rate"))
        return updated_node

    def leave_Call(self, original_node: Call, updated_node: Call) -> BaseExpression:
        name = self.called(original_node)
        if not name:
            return self._method_call(updated_node)

        call = _with_names(updated_node, entries(ARGUMENTS, name))
        if name.startswith(OPTIMIZERS) and not name.startswith("keras.optimizers.schedules."):
            return self._optimizer_call(call)
        # The values in *args and **kwargs are unknown.
        if any(arg.star for arg in call.args):
            return call
        if name == "keras.ops.expand_dims" and argument(call, "axis", 1) is None:
            return with_args(call, [*call.args, keyword("axis", parse_expression("-1"))])
        if name == f"{HVTRAIN}.callbacks.LearningRateWarmupCallback":
            return _warmup_call(call)
        if name == f"{HVTRAIN}.allreduce" and m.matches(call, _AVERAGES):
            # The second parameter is average in horovod.tensorflow, and name in horovod.keras.
            return _with_keywords(call, ["value", "average"])
        if name == f"{HVTRAIN}.callbacks.LearningRateScheduleCallback":
            return _schedule_call(call)
        return call

    def _optimizer_call(self, call: Call) -> Call:
        """Drops arguments that Keras 3 refuses, and turns decay=, which Keras 2 applied per step, into a schedule."""
        no_epsilon = m.Arg(keyword=m.Name("epsilon"), value=m.Name("None"))
        is_dynamic = m.Arg(keyword=m.Name("dynamic"), value=m.Name("True"))
        args = [arg for arg in call.args if not m.matches(arg, no_epsilon | is_dynamic)]
        decay = argument(call, "decay")
        rate = argument(call, "learning_rate", 0)
        without_decay = [arg for arg in args if arg is not decay]
        if decay and is_number(decay.value) and literal_eval(code_of(decay.value)) == 0:
            return with_args(call, without_decay)
        # A callback cannot set the learning rate of a schedule, so decay= stays, and undecided.py
        # reports it.
        if decay is None or rate is None or self.sets_rates:
            return with_args(call, args)

        self.needs_keras = True
        code = f"keras.optimizers.schedules.InverseTimeDecay({code_of(rate.value)}, 1, {code_of(decay.value)})"
        schedule = rate.with_changes(value=parse_expression(code))
        return with_args(call, [schedule if arg is rate else arg for arg in without_decay])

    def _method_call(self, call: Call) -> BaseExpression:
        method = method_of(call)
        if not method:
            return call

        receiver = call.func.value
        if code_of(receiver).startswith("super("):
            return self._super_call(call, method)
        if method == "get_unscaled_gradients" and len(call.args) == 1 and not self.clips:
            return call.args[0].value
        if method == "reset_states" and code_of(receiver).endswith("model"):
            return call  # undecided.py reports it.
        # optimizer.variables is a property in Keras 3.
        if method == "variables" and not call.args:
            return call.func
        if method == "compiled_loss" and not any(arg.star for arg in call.args):
            return _compute_loss_call(call)
        # fit_generator(g, 100, workers=4) becomes fit(g, steps_per_epoch=100). predict_proba is
        # changed only for Keras models: those of other libraries have it too, and their predict
        # returns classes.
        origin = self.imported(self.compiling_class(receiver))
        is_keras = not re.match("sklearn|xgboost|lightgbm|keras.wrappers", origin) and (
            is_model_name(receiver) or origin.endswith((".Sequential", ".Model"))
        )
        if method in RENAMED_METHODS and (is_keras or method != "predict_proba"):
            method, *order = RENAMED_METHODS[method]
            call = _with_names(
                _with_keywords(_with_method(call, method), order), {"generator": "x"}
            )

        call = _with_names(call, entries(ARGUMENTS, f".{method}"))
        if method == "compile":
            return self._compile_call(call)
        return call

    def _super_call(self, call: Call, method: str) -> Call:
        """Changes the arguments that a class in the script passes to its Keras base class through super().

        Arguments that it only passes on are changed where the class is used.
        """
        if method == "__init__" and self._in_optimizer[-1:] == [True]:
            return self._optimizer_call(_with_names(call, entries(ARGUMENTS, OPTIMIZERS[0])))
        if method == "reset_states":
            return _with_method(call, "reset_state")
        if method == "compile":
            call = _with_names(call, entries(ARGUMENTS, f".{method}"))
            if not argument(call, "jit_compile"):
                return self._compile_call(call)
        return call

    def _takes_jit_compile(self, call: Call) -> bool:
        """False for a call of a compile method that the script defines without jit_compile.

        The argument then goes to super().compile inside that method.
        """
        names = {arg.keyword.value for arg in call.args if arg.keyword}
        model_class = self.compiling_class(call.func.value)
        model_name = dotted(model_class)
        # If the script does not show the model's class, it may be any class that takes these arguments.
        is_unknown = model_name not in self.compile_parameters and not self.imported(model_class)
        for class_name, parameters in self.compile_parameters.items():
            accepted = {
                param.name.value for param in (*parameters.params, *parameters.kwonly_params)
            }
            may_match = is_unknown and names <= accepted and (names or model_name != "super")
            is_match = may_match or model_name == class_name
            if is_match and not parameters.star_kwarg:
                return "jit_compile" in accepted
        return True

    def _compile_call(self, call: Call) -> Call:
        """Sets jit_compile=False, since XLA cannot compile Horovod's operations (horovod#2590)."""
        if (
            not self.uses_horovod
            or any(arg.star for arg in call.args)
            or not self._takes_jit_compile(call)
        ):
            return call
        jit_compile = argument(call, "jit_compile")
        if jit_compile is None:
            return with_args(call, [*call.args, keyword("jit_compile", cst.Name("False"))])
        return call.with_deep_changes(jit_compile, value=cst.Name("False"))


def _with_method(call: Call, method: str) -> Call:
    return call.with_deep_changes(call.func, attr=cst.Name(method))


def _compute_loss_call(call: Call) -> Call:
    """Turns compiled_loss(y, prediction) into compute_loss(y=y, y_pred=prediction), which adds regularization."""
    call = _with_names(call, {"y_true": "y", "regularization_losses": None})
    names = ("y", "y_pred", "sample_weight")
    args = [arg if arg.keyword else keyword(name, arg.value) for name, arg in zip(names, call.args)]
    return _with_method(with_args(call, args), "compute_loss")


def _with_keywords(call: Call, names: list[str]) -> Call:
    """Returns the call with positional arguments passed by these names, except the first and those beyond the names."""
    args = list(call.args)
    for number, (arg, name) in enumerate(zip(call.args, names)):
        if number and arg.keyword is None and not arg.star:
            args[number] = keyword(name, arg.value)
    return with_args(call, args)


def _with_names(call: Call, new_names: Mapping[str, str | None]) -> Call:
    """Returns the call with keyword arguments renamed, without those whose new name is None."""
    args = []
    for arg in call.args:
        name = arg.keyword.value if arg.keyword else ""
        new_name = new_names.get(name, name)
        if new_name == name:
            args.append(arg)
        elif new_name is not None:
            args.append(arg.with_changes(keyword=cst.Name(new_name)))

    return with_args(call, args)


def _warmup_call(call: Call) -> Call:
    """Adds initial_lr=None, which means the optimizer's rate; Horovod before 0.20 had no such argument.

    Before 0.20, warmup_epochs came first. It is recognized as a whole number, which a learning rate never is.
    """
    first = argument(call, "initial_lr", 0)
    if first is None:
        return with_args(call, [keyword("initial_lr", parse_expression("None")), *call.args])
    is_whole = first.keyword is None and m.matches(first.value, m.Integer())
    second = argument(call, "warmup_epochs", 1)
    has_epochs = second and not m.matches(second.value, _BOOLEAN)
    if is_whole and not has_epochs:
        return with_args(call, [Arg(parse_expression("None")), *call.args])
    return call


def _schedule_call(call: Call) -> Call:
    """Adds initial_lr=None, since Horovod before 0.20 had no such argument.

    Before 0.20, the multiplier came first, and a number was a plain factor, not yet the base of a power. It is
    recognized by the start_epoch after it, a whole number, which a multiplier never is.
    """
    if argument(call, "initial_lr"):
        return call

    multiplier = argument(call, "multiplier")
    positional = [arg for arg in call.args if arg.keyword is None]
    first, second = [*positional, None, None][:2]
    is_start = second and not argument(call, "start_epoch") and m.matches(second.value, m.Integer())
    if multiplier is None and (second is None or is_start):
        multiplier = first

    if first and (multiplier is first or isinstance(first.value, cst.Lambda)):
        initial_lr = Arg(parse_expression("None"))
    elif multiplier and not first:
        initial_lr = keyword("initial_lr", parse_expression("None"))
    else:
        return call

    if multiplier and is_number(multiplier.value):
        factor = parse_expression(f"lambda epoch: {code_of(multiplier.value)}")
        call = call.with_deep_changes(multiplier, value=factor)
    return with_args(call, [initial_lr, *call.args])
