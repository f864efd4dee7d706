"""A user's package: a network with what depends on a rank's own batch and seeds, batch normalization and dropout."""

import keras


def model(image_shape, num_classes, drop=0.2, **_):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(drop),
            keras.layers.Dense(num_classes),
        ]
    )
