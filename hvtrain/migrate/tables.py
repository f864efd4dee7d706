"""What Keras 3 and hvtrain.keras have renamed or removed: names, arguments and methods. The passes only apply it.

The names of today are read from the files of the installed packages, without importing TensorFlow.
"""

import ast
import difflib
import functools
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# Today's tf.keras is Keras 3 with some names of Keras 2, which are in this folder.
KERAS = "keras"
TF_KERAS = "keras/_tf_keras/keras"
TENSORFLOW = "tensorflow/_api/v2"

# The longest prefix that fits is replaced; the rest of the name stays.
_PREFIXES = {
    "tensorflow.compat.v1.keras": "keras",
    "tensorflow.compat.v2.keras": "keras",
    "tensorflow.python.keras": "keras",
    "tensorflow.keras": "keras",
    "tf_keras": "keras",
    "horovod.tensorflow.keras": "hvtrain.keras",
    "horovod.keras": "hvtrain.keras",
    "horovod.tensorflow": "hvtrain.keras",
    "tensorflow.optimizers": "keras.optimizers",
    "tensorflow.losses": "keras.losses",
    "tensorflow.metrics": "keras.metrics",
    # Tools of TensorFlow 1 that need no graph.
    "tensorflow.app.flags": "tensorflow.compat.v1.flags",
    "tensorflow.compat.v1.app.flags": "tensorflow.compat.v1.flags",
    **{f"tensorflow.{name}": f"tensorflow.compat.v1.{name}" for name in ("app", "flags", "gfile", "logging")},
}
_OLD_LAYER_MODULES = (
    "advanced_activations", "convolutional", "core", "embeddings", "experimental", "experimental.preprocessing",
    "local", "merge", "noise", "normalization", "pooling", "recurrent", "wrappers",
)  # fmt: skip
# Modules that no longer exist, and the module that has their content now.
_DISSOLVED = {
    **{f"keras.layers.{name}": "keras.layers" for name in _OLD_LAYER_MODULES},
    "keras.optimizers.legacy": "keras.optimizers",
    "keras.optimizers.experimental": "keras.optimizers",
    "keras.optimizers.schedules.experimental": "keras.optimizers.schedules",
    "keras.callbacks.experimental": "keras.callbacks",
    "keras.mixed_precision.experimental": "keras.mixed_precision",
    "keras.utils.np_utils": "keras.utils",
    "keras.utils.generic_utils": "keras.utils",
    "keras.engine.training": "keras",
    "keras.engine": "keras",
}
# Functions of keras.backend that keras.ops has under the same name, with the same arguments.
_OPS = (
    "abs", "all", "any", "arange", "argmax", "argmin", "cast", "clip", "concatenate", "convert_to_tensor", "cos",
    "equal", "exp", "expand_dims", "eye", "greater", "greater_equal", "less", "less_equal", "log", "max", "maximum",
    "mean", "min", "minimum", "not_equal", "ones_like", "prod", "relu", "reshape", "round", "shape", "sigmoid", "sign",
    "sin", "softmax", "softplus", "softsign", "sqrt", "square", "squeeze", "stack", "std", "stop_gradient", "sum",
    "tanh", "tile", "transpose", "var", "zeros_like",
)  # fmt: skip
_KERAS_OPTIMIZERS = ("SGD", "RMSprop", "Adam", "Nadam", "Adagrad", "Adadelta", "Adamax")
_EXACT = {
    **{f"keras.backend.{name}": f"keras.ops.{name}" for name in _OPS},
    **{f"keras.optimizers.{name.lower()}": f"keras.optimizers.{name}" for name in _KERAS_OPTIMIZERS},
    "keras.backend.get_value": "keras.ops.convert_to_numpy",
    "keras.layers.CuDNNLSTM": "keras.layers.LSTM",
    "keras.layers.CuDNNGRU": "keras.layers.GRU",
    "keras.losses.Reduction.AUTO": '"sum_over_batch_size"',
    "keras.losses.Reduction.SUM_OVER_BATCH_SIZE": '"sum_over_batch_size"',
    "keras.losses.Reduction.SUM": '"sum"',
    "keras.losses.Reduction.NONE": '"none"',
    "keras.losses.mse": "keras.losses.mean_squared_error",
    "keras.losses.mae": "keras.losses.mean_absolute_error",
    "keras.mixed_precision.set_policy": "keras.mixed_precision.set_global_policy",
    "keras.experimental.CosineDecay": "keras.optimizers.schedules.CosineDecay",
    "tensorflow.set_random_seed": "tensorflow.random.set_seed",
    "tensorflow.random.set_random_seed": "tensorflow.random.set_seed",
}
# What the user is told about a removed name, by its beginning.
ADVICE = {
    "keras.backend.set_session": "Keras 3 has no sessions; remove the line (hvd.pin_gpu() chooses the GPU)",
    "keras.backend.get_session": "Keras 3 has no sessions; variables have .numpy() and .assign()",
    "keras.backend.set_value": "use variable.assign(value)",
    "keras.backend.set_learning_phase": "pass training=True or False to the call of the model",
    "keras.backend.learning_phase": "pass training=True or False to the call of the model",
    "keras.layers.SyncBatchNormalization": "use hvd.SyncBatchNormalization()",
    "keras.mixed_precision.loss_scale": "hvd.DistributedOptimizer scales losses under mixed_float16 by itself",
    "keras.utils.multi_gpu_model": "one process for each GPU replaces it; remove it",
    "keras.wrappers.scikit_learn": "use keras.wrappers.SKLearnClassifier or SKLearnRegressor",
    "keras.estimator": "TensorFlow has no estimators any more; docs/migration.md lists what replaces them",
    "tensorflow.estimator": "TensorFlow has no estimators any more; docs/migration.md lists what replaces them",
    "tensorflow.contrib": "tf.contrib ended with TensorFlow 1",
    "tensorflow.python": "a private module; use the public name",
    "tensorflow.distribute": "Horovod's ranks replace it; remove it, with its scope",
    "horovod.tensorflow.BroadcastGlobalVariablesHook": "was removed, because it was built on tf.estimator; "
    "examples/tf1_monitored_session.py has one",
    "hvtrain.keras.BroadcastGlobalVariablesHook": "a hook of tf.estimator; use hvd.BroadcastGlobalVariablesCallback(0)",
    "hvtrain.keras.broadcast_global_variables": "use hvd.BroadcastGlobalVariablesCallback(0) or hvd.broadcast_model",
}
_GRAPH = "TensorFlow 1's graph mode; rewrite the loop, or keep it as examples/tf1_monitored_session.py does"
# Of tensorflow, and of tensorflow.compat.v1.
_GRAPH_NAMES = (
    "ConfigProto", "GPUOptions", "Session", "InteractiveSession", "placeholder", "get_variable", "variable_scope",
    "global_variables_initializer", "layers", "disable_eager_execution", "disable_v2_behavior",
    "train.AdamOptimizer", "train.AdagradOptimizer", "train.AdadeltaOptimizer", "train.MomentumOptimizer",
    "train.GradientDescentOptimizer", "train.RMSPropOptimizer", "train.FtrlOptimizer",
    "train.MonitoredTrainingSession", "train.get_or_create_global_step",
)  # fmt: skip
ADVICE |= {f"{module}.{name}": _GRAPH for module in ("tensorflow", "tensorflow.compat.v1") for name in _GRAPH_NAMES}
ADVICE["tensorflow.compat.v1.train"] = _GRAPH
# Keras 3 has these only as options of a PyDataset.
_WORKERS = {"workers": None, "use_multiprocessing": None, "max_queue_size": None}
# Arguments with a new name, or (None) that can be dropped without loss. A key is a full name, the
# beginning of one if it ends in a dot, or a method if it begins with one.
ARGUMENTS: dict[str, dict[str, str | None]] = {
    "keras.optimizers.": {"lr": "learning_rate"},
    "tensorflow.function": {"experimental_compile": "jit_compile", "experimental_relax_shapes": "reduce_retracing"},
    "keras.layers.LeakyReLU": {"alpha": "negative_slope"},
    "keras.layers.Embedding": {"input_length": None},
    "keras.layers.BatchNormalization": {"fused": None},
    "keras.layers.InputLayer": {"input_shape": "shape", "batch_input_shape": "batch_shape"},
    "keras.callbacks.ReduceLROnPlateau": {"epsilon": "min_delta"},
    "keras.callbacks.TensorBoard": {"write_grads": None, "batch_size": None},
    ".compile": {
        "experimental_run_tf_function": None,
        "experimental_steps_per_execution": "steps_per_execution",
    },
    ".fit": {"nb_epoch": "epochs", **_WORKERS},
    ".evaluate": {**_WORKERS},
    ".predict": {**_WORKERS},
}
# Removed arguments that a person must replace, and how; keys as in ARGUMENTS.
REMOVED_ARGUMENTS: dict[str, dict[str, str]] = {
    # The optimizers' own pass has left it, because Keras refuses to set the rate of a schedule.
    "keras.optimizers.": {
        "decay": "is ignored by Keras 3, and a schedule cannot replace it, because a callback of this script sets the "
        "rate; put the decay into that callback",
    },
    "keras.mixed_precision.LossScaleOptimizer": dict.fromkeys(
        ("dynamic", "loss_scale"), "was removed; the scale always adapts, from initial_scale on"
    ),
    "keras.callbacks.ModelCheckpoint": {"period": "was removed; save_freq counts batches, or is 'epoch'"},
    "keras.layers.BatchNormalization": {
        "renorm": "was removed from BatchNormalization; leave it out",
        "virtual_batch_size": "was removed from BatchNormalization; leave it out",
    },
    ".compile": {
        "sample_weight_mode": "was removed; pass sample_weight to fit",
        "target_tensors": "was removed; pass the targets to fit",
    },
    ".save": {"save_format": "was removed; the suffix .keras says it, and model.export writes a SavedModel"},
}
# Methods with a new name: that name, and the order in which the old one took its arguments.
_STEPS = ("generator", "steps", "callbacks", "max_queue_size", "workers", "use_multiprocessing", "verbose")
RENAMED_METHODS = {
    "fit_generator": (
        "fit", "generator", "steps_per_epoch", "epochs", "verbose", "callbacks", "validation_data", "validation_steps",
        "validation_freq", "class_weight", "max_queue_size", "workers", "use_multiprocessing", "shuffle",
        "initial_epoch",
    ),
    "evaluate_generator": ("evaluate", *_STEPS),
    "predict_generator": ("predict", *_STEPS),
    "predict_proba": ("predict",),
    "get_scaled_loss": ("scale_loss",),
    "reset_states": ("reset_state",),
}  # fmt: skip
# Removed methods of models and optimizers.
REMOVED_METHODS = {
    "predict_classes": "was removed; use np.argmax(model.predict(x), axis=-1)",
    "get_gradients": "was removed; use tf.GradientTape",
    "minimize": "was removed; use tf.GradientTape, then optimizer.apply_gradients",
    "add_metric": "was removed; keep the metric as an attribute and call its update_state",
    "add_update": "was removed; assign to the variable in call",
    "get_updates": "was removed; override update_step",
    "get_unscaled_gradients": "was removed, because the optimizer's step unscales; pass it the scaled gradients, and "
    "clip them by an argument of the optimizer",
    "reset_states": "was removed from models; call reset_state() of each stateful layer",
}


def _starts(name: str, beginning: str) -> bool:
    return name == beginning or name.startswith(f"{beginning}.")


def _longest(table: Iterable[str], name: str) -> str:
    """The longest beginning of the name in a table; empty if there is none."""
    return max((old for old in table if _starts(name, old)), key=len, default="")


def new_name(name: str) -> str:
    """The name on Keras 3, or the code that replaces it; the name itself if nothing changes.

    A name that only tf.keras still has stays there.

    >>> new_name("tensorflow.keras.layers.CuDNNLSTM"), new_name("horovod.keras.init")
    ('keras.layers.LSTM', 'hvtrain.keras.init')
    >>> new_name("keras.preprocessing.text.Tokenizer"), new_name("tensorflow.keras.losses.Reduction.SUM")
    ('tensorflow.keras.preprocessing.text.Tokenizer', '"sum"')
    """
    new = name

    for table in (_PREFIXES, _DISSOLVED):
        old = _longest(table, new)
        # The module's own name stays; names in it are replaced.
        if old and not (table is _DISSOLVED and new == old):
            new = table[old] + new[len(old) :]

    new = _EXACT.get(new, new)
    if not _starts(new, "keras") or exists(new):
        return new
    # tensorflow.losses and the like were TensorFlow 1's own modules, too.
    if _starts(name, "tensorflow") and "keras" not in name:
        return name
    return f"tensorflow.{new}" if exists(new, TF_KERAS) else new


def advice(name: str) -> str:
    """What to do about a removed name; empty if nothing is known."""
    return ADVICE.get(_longest(ADVICE, name), "")


def entries(table: Mapping[str, Mapping[str, T]], name: str, method: str) -> dict[str, T]:
    """The entries of ARGUMENTS or REMOVED_ARGUMENTS for a call, by argument.

    Args:
        table: One of the two.
        name: The full name of what is called; empty if it is not imported.
        method: The name after its last dot.

    >>> entries(REMOVED_ARGUMENTS, "", "save").keys(), entries(ARGUMENTS, "keras.optimizers.SGD", "SGD")
    (dict_keys(['save_format']), {'lr': 'learning_rate'})
    """
    merged: dict[str, T] = {}
    for key, arguments in table.items():
        is_beginning = key.endswith(".") and name.startswith(key)
        if is_beginning or key == (name or f".{method}"):
            merged |= arguments

    return merged


@functools.cache
def _site() -> Path:
    spec = find_spec("keras")
    assert spec and spec.submodule_search_locations, "hvtrain needs keras"
    return Path(spec.submodule_search_locations[0]).parent


@functools.cache
def members(package: str) -> frozenset[str]:
    """The names that an installed package imports; empty if there is no such package."""
    # Of TensorFlow's own names the package __init__.py holds none.
    file = _site() / package / ("v2.py" if package == TENSORFLOW else "__init__.py")
    if not file.exists():
        return frozenset()
    imports = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)]
    return frozenset(alias.asname or alias.name for node in imports for alias in node.names)


def exists(name: str, root: str = KERAS) -> bool:
    """True if Keras 3, or TensorFlow 2, has this name.

    root: KERAS, or TF_KERAS for the names of tf.keras, or TENSORFLOW for those of TensorFlow.

    >>> exists("keras.layers.Dense"), exists("keras.layers.CuDNNLSTM"), exists("keras")
    (True, False, True)
    >>> exists("tensorflow.train.Checkpoint", TENSORFLOW), exists("tensorflow.train.StopAtStepHook", TENSORFLOW)
    (True, False)
    """
    package = root

    for part in name.split(".")[1:]:
        if not (_site() / package).is_dir():
            return True  # An attribute of a class or a function.
        if part not in members(package):
            return False
        package = f"{package}/{part}"

    return True


def nearest(name: str) -> str:
    """The most similar name of Keras 3 in the same module; empty if none is similar.

    >>> nearest("keras.layers.Desne")
    'keras.layers.Dense'
    """
    module, _, last = name.rpartition(".")
    matches = difflib.get_close_matches(last, members(module.replace(".", "/")), 1, cutoff=0.75)
    return f"{module}.{matches[0]}" if matches else ""


@functools.cache
def names_of_hvtrain() -> frozenset[str]:
    """The public names of hvtrain.keras."""
    tree = ast.parse((Path(__file__).parents[1] / "keras/__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    raise AssertionError("hvtrain.keras has no __all__")
