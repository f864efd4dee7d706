"""The loss of a classifier for targets that are mixed: of several classes, each with its part."""

from typing import Any

import keras

from hvtrain.errors import ConfigError


def of_parts(loss: Any) -> keras.losses.Loss:
    """The sparse cross-entropy, which takes rows of parts as well as indices of classes; their rank tells which.

    Keras saves it as the plain loss. Raises ConfigError for another loss, which may take indices alone.
    """
    base = keras.losses.SparseCategoricalCrossentropy
    if type(loss) is not base or loss.ignore_class is not None:
        raise ConfigError(
            f"augment mixes the classes of examples, and task.loss is {type(loss).__name__}, which may take indices of "
            "classes alone; choose keras.losses.SparseCategoricalCrossentropy, or leave out what mixes (MixUp, CutMix)"
        )

    def call(self: Any, y_true: Any, y_pred: Any) -> Any:
        if len(y_true.shape) < len(y_pred.shape):
            return base.call(self, y_true, y_pred)
        return keras.losses.categorical_crossentropy(y_true, y_pred, from_logits=self.from_logits)

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    either: Any = object.__new__(type(base.__name__, (base,), {**names, "call": call}))
    vars(either).update(vars(loss))
    return either
