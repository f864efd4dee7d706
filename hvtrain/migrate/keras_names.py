"""Names that the installed Keras and hvtrain.keras have, read from their files, without importing TensorFlow."""

import ast
import difflib
import functools
from importlib.util import find_spec
from pathlib import Path

# tf.keras of today's TensorFlow is Keras 3 and some names of Keras 2, which it keeps here.
KERAS, TF_KERAS = "keras", "keras/_tf_keras/keras"


@functools.cache
def _site() -> Path:
    spec = find_spec("keras")
    assert spec and spec.submodule_search_locations, "hvtrain needs keras"
    return Path(spec.submodule_search_locations[0]).parent


@functools.cache
def members(place: str) -> frozenset[str]:
    """What a module that is a folder of the installed Keras imports by name; nothing for a place that is none."""
    file = _site() / place / "__init__.py"
    if not file.exists():
        return frozenset()
    imports = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)]
    return frozenset(alias.asname or alias.name for node in imports for alias in node.names)


def exists(name: str, root: str = KERAS) -> bool:
    """Whether Keras 3 has this name.

    >>> exists("keras.layers.Dense"), exists("keras.layers.CuDNNLSTM"), exists("keras")
    (True, False, True)
    """
    place = root
    for part in name.split(".")[1:]:
        if not (_site() / place).is_dir():
            return True  # An attribute of a class or a function.
        if part not in members(place):
            return False
        place = f"{place}/{part}"
    return True


def nearest(name: str) -> str:
    """The name of Keras 3 in the same module that is spelled most alike; empty if none is.

    >>> nearest("keras.layers.Desne")
    'keras.layers.Dense'
    """
    module, _, last = name.rpartition(".")
    found = difflib.get_close_matches(last, members(module.replace(".", "/")), 1, cutoff=0.75)
    return f"{module}.{found[0]}" if found else ""


@functools.cache
def names_of_hvtrain() -> frozenset[str]:
    """The public names of hvtrain.keras."""
    body = ast.parse((Path(__file__).parents[1] / "keras/__init__.py").read_text()).body
    (names,) = [
        node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return frozenset(ast.literal_eval(names))
