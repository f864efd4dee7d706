"""Two plain networks, mlp and cnn: quick to train, for first runs and for tests."""

from collections.abc import Sequence

import keras
from keras import layers

from hvtrain.errors import ConfigError
from hvtrain.models.input_output import check_activation, check_rate, image_input, logits


def mlp(
    image_shape: Sequence[int],
    num_classes: int,
    hidden: Sequence[int] = (128, 64),
    activation: str = "relu",
    dropout: float = 0.0,
) -> keras.Model:
    """Dense layers of the sizes in `hidden`, each followed by dropout if that is not 0. Without hidden layers it is
    logistic regression."""
    if any(not isinstance(units, int) or units < 1 for units in hidden):
        raise ConfigError(f"mlp was given hidden={list(hidden)}; it needs whole numbers from 1, such as [128, 64]")
    check_activation("mlp", activation)
    check_rate("mlp", "dropout", dropout)

    image = image_input(image_shape, num_classes, network="mlp")
    x = layers.Flatten(name="flatten")(image)
    for i, units in enumerate(hidden, start=1):
        x = layers.Dense(units, activation=activation, name=f"dense{i}")(x)
        if dropout:
            x = layers.Dropout(dropout, name=f"dropout{i}")(x)
    return keras.Model(image, logits(x, num_classes), name="mlp")


def cnn(
    image_shape: Sequence[int],
    num_classes: int,
    dropout: Sequence[float] = (0.25, 0.5),
) -> keras.Model:
    """The classic Keras MNIST network: 1,199,882 parameters on 28x28x1 with 10 classes; images from 6x6.

    dropout: the fractions dropped after the pooling and after the dense layer.
    """
    if len(dropout) != 2:
        raise ConfigError(f"cnn was given dropout={list(dropout)}; it needs two fractions, such as [0.25, 0.5]")
    for rate in dropout:
        check_rate("cnn", "dropout", rate)

    image = image_input(image_shape, num_classes, network="cnn", min_side=6)
    x = layers.Conv2D(32, 3, activation="relu", name="conv1")(image)
    x = layers.Conv2D(64, 3, activation="relu", name="conv2")(x)
    x = layers.MaxPooling2D(2, name="pool")(x)
    x = layers.Dropout(dropout[0], name="dropout1")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(128, activation="relu", name="dense")(x)
    x = layers.Dropout(dropout[1], name="dropout2")(x)
    return keras.Model(image, logits(x, num_classes), name="cnn")
