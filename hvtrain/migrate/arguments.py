"""The pass that changes arguments of calls: of Keras's classes, of models' methods, of Horovod's callbacks."""

import libcst as cst
import libcst.matchers as m

from hvtrain.migrate.parsing import HVTRAIN, Pass, argument, code_of, expression, is_number, keyword, with_args

# By the beginning of the full name: arguments with a new name, or (None) that can be dropped without loss.
RENAMED: dict[str, dict[str, str | None]] = {
    "keras.optimizers.": {"lr": "learning_rate"},
    "keras.layers.LeakyReLU": {"alpha": "negative_slope"},
    "keras.layers.Embedding": {"input_length": None},
    "keras.layers.BatchNormalization": {"fused": None},
    "keras.layers.InputLayer": {"input_shape": "shape", "batch_input_shape": "batch_shape"},
    "keras.callbacks.ReduceLROnPlateau": {"epsilon": "min_delta"},
    "keras.callbacks.TensorBoard": {"write_grads": None, "batch_size": None},
}
METHODS: dict[str, dict[str, str | None]] = {
    "compile": {"experimental_run_tf_function": None, "experimental_steps_per_execution": "steps_per_execution"},
    "fit": {"nb_epoch": "epochs", "workers": None, "use_multiprocessing": None, "max_queue_size": None},
    "evaluate": {"workers": None, "use_multiprocessing": None, "max_queue_size": None},
    "predict": {"workers": None, "use_multiprocessing": None, "max_queue_size": None},
}
# Methods that took a generator: the method that takes it now, and the order of the arguments.
GENERATORS = {
    "fit_generator": (
        "fit", "generator", "steps_per_epoch", "epochs", "verbose", "callbacks", "validation_data", "validation_steps",
        "validation_freq", "class_weight", "max_queue_size", "workers", "use_multiprocessing", "shuffle",
        "initial_epoch",
    ),
    "evaluate_generator": (
        "evaluate", "generator", "steps", "callbacks", "max_queue_size", "workers", "use_multiprocessing", "verbose",
    ),
    "predict_generator": (
        "predict", "generator", "steps", "callbacks", "max_queue_size", "workers", "use_multiprocessing", "verbose",
    ),
}  # fmt: skip
SETS_RATES = ("LearningRate", "ReduceLROnPlateau")


class Arguments(Pass):
    """uses_horovod: whether the models of this script are trained by Horovod."""

    def __init__(self, text: str, uses_horovod: bool) -> None:
        super().__init__()
        self.uses_horovod = uses_horovod
        self.sets_rates = any(word in text for word in SETS_RATES)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        """Renames optimizer.lr."""
        ends_in_optimizer = m.Name("optimizer") | m.Name("opt") | m.Attribute(attr=m.Name("optimizer"))
        if m.matches(updated_node, m.Attribute(value=ends_in_optimizer, attr=m.Name("lr"))):
            return updated_node.with_changes(attr=cst.Name("learning_rate"))
        return updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        name = self.imported(original_node.func)
        if not name:
            return self._method(updated_node)
        call = updated_node
        for beginning, renamed in RENAMED.items():
            if name == beginning or (beginning.endswith(".") and name.startswith(beginning)):
                call = _with_names(call, renamed)
        if name.startswith("keras.optimizers.") and not name.startswith("keras.optimizers.schedules."):
            return self._optimizer(call)
        if name.startswith(HVTRAIN) and name.endswith(".LearningRateWarmupCallback"):
            is_old = not argument(call, "initial_lr", 0)
            return with_args(call, [keyword("initial_lr", expression("None")), *call.args]) if is_old else call
        if name.startswith(HVTRAIN) and name.endswith(".LearningRateScheduleCallback"):
            return _schedule(call)
        return call

    def _optimizer(self, call: cst.Call) -> cst.Call:
        """Drops epsilon=None, which meant the default, and turns decay=, which acted on each step, into a schedule."""
        args = [arg for arg in call.args if not m.matches(arg, m.Arg(keyword=m.Name("epsilon"), value=m.Name("None")))]
        decay, rate = argument(call, "decay"), argument(call, "learning_rate", 0)
        if decay is None:
            return with_args(call, args) if len(args) < len(call.args) else call
        kept = [arg for arg in args if arg is not decay]
        if isinstance(decay.value, cst.Integer | cst.Float) and float(code_of(decay.value)) == 0:
            return with_args(call, kept)
        if rate is None or self.sets_rates:
            return with_args(call, args)  # By hand: see undecided.py.
        code = f"keras.optimizers.schedules.InverseTimeDecay({code_of(rate.value)}, 1, {code_of(decay.value)})"
        return with_args(call, [arg.with_changes(value=expression(code)) if arg is rate else arg for arg in kept])

    def _method(self, call: cst.Call) -> cst.Call:
        if not isinstance(call.func, cst.Attribute) or m.matches(call.func.value, m.Call(func=m.Name("super"))):
            return call
        method = call.func.attr.value
        if method == "variables" and not call.args:
            return call.func
        if method == "compiled_loss" and len(call.args) in (2, 3):
            loss = call.func.with_changes(attr=cst.Name("compute_loss"))
            if all(arg.keyword is None or arg.keyword.value == "regularization_losses" for arg in call.args):
                pairs = zip(("y", "y_pred"), call.args)
                return with_args(call, [keyword(name, arg.value) for name, arg in pairs]).with_changes(func=loss)
        if method == "predict_proba":
            return call.with_changes(func=call.func.with_changes(attr=cst.Name("predict")))
        if method in GENERATORS:
            method, *order = GENERATORS[method]
            call = call.with_changes(func=call.func.with_changes(attr=cst.Name(method)))
            args = [
                keyword(name, arg.value) if arg.keyword is None and not arg.star and number else arg
                for number, (arg, name) in enumerate(zip(call.args, [*order, *[""] * len(call.args)]))
            ]
            call = _with_names(with_args(call, args), {"generator": "x"})
        call = _with_names(call, METHODS.get(method, {}))
        return self._compile(call) if method == "compile" else call

    def _compile(self, call: cst.Call) -> cst.Call:
        if not self.uses_horovod or any(arg.star for arg in call.args):
            return call
        given = argument(call, "jit_compile")
        if given is None:
            return with_args(call, [*call.args, keyword("jit_compile", cst.Name("False"))])
        off = [arg.with_changes(value=cst.Name("False")) if arg is given else arg for arg in call.args]
        return with_args(call, off)


def _with_names(call: cst.Call, names: dict[str, str | None]) -> cst.Call:
    args: list[cst.Arg] = []
    for arg in call.args:
        name = arg.keyword.value if arg.keyword else ""
        new = names.get(name, name)
        if new is not None:
            args.append(arg if new == name else arg.with_changes(keyword=cst.Name(new)))
    return call if args == list(call.args) else with_args(call, args)


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
        initial = cst.Arg(expression("None"))
    elif multiplier is not None and not positional:
        initial = keyword("initial_lr", expression("None"))
    else:
        return call
    args = list(call.args)
    if multiplier is not None and is_number(multiplier.value):
        code = f"lambda epoch: {code_of(multiplier.value)}"
        args = [arg.with_changes(value=expression(code)) if arg is multiplier else arg for arg in args]
    return with_args(call, [initial, *args])
