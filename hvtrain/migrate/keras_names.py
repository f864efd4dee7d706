"""The names in the installed Keras and in hvtrain.keras, read from their files without importing TensorFlow."""

import ast
import difflib
import functools
from importlib.util import find_spec
from pathlib import Path

# Today's tf.keras is Keras 3 with some names of Keras 2, which are in this folder.
KERAS, TF_KERAS = "keras", "keras/_tf_keras/keras"


@functools.cache
def _site() -> Path:
    spec = find_spec("keras")
    assert spec and spec.submodule_search_locations, "hvtrain needs keras"
    return Path(spec.submodule_search_locations[0]).parent


@functools.cache
def members(place: str) -> frozenset[str]:
    """The names that a package of the installed Keras imports; empty if there is no such package."""
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
    """The most similar name of Keras 3 in the same module; empty if none is similar.

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
