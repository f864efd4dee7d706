"""How an example in the user's arrays or files becomes what a model is trained on, in the saved model too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras


@dataclass(frozen=True)
class Preprocessing:
    """Turns one raw example into what the model trains on.

    It goes into the saved model, before the trained one. So it may hold only what plain Keras loads without hvtrain,
    and it must give the same bits as the input pipeline.
    """

    shape: Any
    """Shape of a raw example, an array of any numeric type; None for a side of any size. Or, for raw examples that are
    no single array of numbers, a nested structure of tf.TensorSpec, which the model takes as it is."""
    layers: Sequence[Callable[[Any], Any]] = ()
    """Keras layers or functions of keras.ops, in order."""
    values: str = "as the data set's streams give them"
    """The values in a raw example, described for the user of the saved model."""
    range: tuple[float, float] | None = None
    """The smallest and the largest value, if known."""

    def inputs(self) -> Any:
        """The inputs of a saved model; an array's is float32, to which Keras converts all other numeric types."""
        if isinstance(self.shape, tuple):
            return keras.Input(self.shape, dtype="float32", name="raw")
        return symbolic(self.shape)

    def __call__(self, raw: Any) -> Any:
        for layer in self.layers:
            raw = layer(raw)
        return raw


def symbolic(spec: Any) -> Any:
    """Keras inputs for a nested structure of tf.TensorSpec of one example, under their names in a dict."""
    inputs = []
    for path, one in keras.tree.flatten_with_path(spec):
        name = one.name or (path[-1] if path and isinstance(path[-1], str) else None)
        inputs.append(keras.Input(tuple(one.shape), dtype=one.dtype.name, name=name))
    return keras.tree.pack_sequence_as(spec, inputs)
