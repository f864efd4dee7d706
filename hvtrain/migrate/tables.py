"""Looks up what Keras 3 and hvtrain.keras have renamed or removed, as listed in tables.yaml.

Current names are read from the source files of the installed packages, without importing TensorFlow.
"""

import ast
import difflib
import functools
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

# Folders of packages for members() and exists(), absolute or relative to _SITE. Today's tf.keras is
# Keras 3 plus some names of Keras 2, which are in TF_KERAS.
KERAS = "keras"
TF_KERAS = "keras/_tf_keras/keras"
TENSORFLOW = "tensorflow/_api/v2"
HVTRAIN_KERAS = str(Path(__file__).parents[1] / "keras")
# The folder in which Keras and TensorFlow are installed.
_SITE = Path(str(metadata.distribution("keras").locate_file("")))

_TABLES = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text("utf-8"))
_EXACT: dict[str, str] = _TABLES["exact"] | {
    f"keras.backend.{name}": f"keras.ops.{name}" for name in _TABLES["backend_in_ops"].split()
}
ADVICE: dict[str, str] = _TABLES["advice"] | {
    f"{module}.{name}": _TABLES["graph_mode"]["advice"]
    for module in ("tensorflow", "tensorflow.compat.v1")
    for name in _TABLES["graph_mode"]["names"].split()
}
ARGUMENTS: dict[str, dict[str, str | None]] = _TABLES["arguments"]
REMOVED_ARGUMENTS: dict[str, dict[str, str]] = _TABLES["removed_arguments"]
RENAMED_METHODS = {name: line.split() for name, line in _TABLES["renamed_methods"].items()}
REMOVED_METHODS: dict[str, str] = _TABLES["removed_methods"]


def _has_prefix(name: str, prefix: str) -> bool:
    return f"{name}.".startswith(f"{prefix}.")


def _longest_prefix(table: Iterable[str], name: str) -> str:
    """Returns the longest entry of a table that is the name or a dotted prefix of it; empty if there is none."""
    return max((old for old in table if _has_prefix(name, old)), key=len, default="")


def new_name(name: str) -> str:
    """Returns a name's new name in Keras 3, or the code that replaces it; the name itself if nothing changes.

    A name that only tf.keras still has is left in tf.keras.

    >>> new_name("tensorflow.keras.layers.CuDNNLSTM"), new_name("horovod.keras.init")
    ('keras.layers.LSTM', 'hvtrain.keras.init')
    >>> new_name("keras.preprocessing.text.Tokenizer"), new_name("tensorflow.keras.losses.Reduction.SUM")
    ('tensorflow.keras.preprocessing.text.Tokenizer', '"sum"')
    """
    new = name

    for kind in ("prefixes", "dissolved"):
        old = _longest_prefix(_TABLES[kind], new)
        # A dissolved module itself keeps its name; only the names in it have moved.
        if old and not (kind == "dissolved" and new == old):
            new = _TABLES[kind][old] + new[len(old) :]

    new = _EXACT.get(new, new)
    if not _has_prefix(new, "keras") or exists(new):
        return new
    # tensorflow.losses and the like were modules of TensorFlow 1 too, so an unknown name in them
    # does not belong to Keras.
    if _has_prefix(name, "tensorflow") and "keras" not in name:
        return name
    return f"tensorflow.{new}" if exists(new, TF_KERAS) else new


def advice(name: str) -> str:
    """Returns advice on what to do about a removed name; empty if there is none."""
    return ADVICE.get(_longest_prefix(ADVICE, name), "")


def entries(table: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Returns the entries of ARGUMENTS or REMOVED_ARGUMENTS that apply to a call, by argument.

    Args:
        table: ARGUMENTS or REMOVED_ARGUMENTS.
        name: The full name of the called object; .METHOD if it is not imported.

    >>> entries(REMOVED_ARGUMENTS, ".save").keys(), entries(ARGUMENTS, "keras.optimizers.SGD")
    (dict_keys(['save_format']), {'lr': 'learning_rate'})
    """
    merged: dict[str, Any] = {}
    for key, arguments in table.items():
        is_prefix = key.endswith(".") and name.startswith(key)
        if is_prefix or key == name:
            merged |= arguments

    return merged


@functools.cache
def members(package: str) -> frozenset[str]:
    """Returns the names that an installed package imports into its namespace; empty if there is no such package."""
    # TensorFlow's own names are in v2.py, not in __init__.py.
    file = _SITE / package / ("v2.py" if package == TENSORFLOW else "__init__.py")
    if not file.exists():
        return frozenset()
    return frozenset(
        alias.asname or alias.name
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )


def exists(name: str, root: str = KERAS) -> bool:
    """True if the installed Keras 3 or TensorFlow 2 has this name.

    Args:
        name: A dotted name, such as keras.layers.Dense.
        root: KERAS, TF_KERAS for the names of tf.keras, or TENSORFLOW.

    >>> exists("keras.layers.Dense"), exists("keras.layers.CuDNNLSTM"), exists("keras")
    (True, False, True)
    >>> exists("tensorflow.train.Checkpoint", TENSORFLOW), exists("tensorflow.train.StopAtStepHook", TENSORFLOW)
    (True, False)
    """
    package = root

    for part in name.split(".")[1:]:
        if not (_SITE / package).is_dir():
            return True  # An attribute of a class or a function.
        if part not in members(package):
            return False
        package = f"{package}/{part}"

    return True


def nearest(name: str) -> str:
    """Returns the most similar name of Keras 3 in the same module; empty if none is similar.

    >>> nearest("keras.layers.Desne")
    'keras.layers.Dense'
    """
    module, _, last = name.rpartition(".")
    matches = difflib.get_close_matches(last, members(module.replace(".", "/")), 1, cutoff=0.75)
    return f"{module}.{matches[0]}" if matches else ""
