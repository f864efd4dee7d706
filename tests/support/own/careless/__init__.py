"""A user's package with mistakes: models, data sets, a layer and a callback."""

import keras
import leaves
import numpy as np
import tensorflow as tf

from hvtrain.data import from_arrays


class Subclassed(keras.Model):
    """Unbuilt, and without get_config()."""

    def __init__(self, units, fails=False):
        super().__init__()
        self.flat, self.dense, self.fails = keras.layers.Flatten(), keras.layers.Dense(units), fails

    def call(self, images):
        if self.fails:
            raise ZeroDivisionError("in call")  # in call
        return self.dense(self.flat(images))


class Layer(keras.layers.Layer):
    """Fails in training, when its graph is made or when that runs."""

    def __init__(self, when):
        super().__init__()
        self.when = when

    def call(self, inputs, training=False):
        if training and self.when == "trace":
            raise KeyError("a leaf")  # trace
        if training and self.when == "run":
            return tf.ensure_shape(tf.numpy_function(fall, [inputs], tf.float32), inputs.shape)
        if training and self.when == "check":
            too_bright = tf.debugging.assert_less(inputs, -9.0, "too bright")  # check
            with tf.control_dependencies([too_bright]):
                return tf.identity(inputs)
        return inputs


class Callback(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise AttributeError("no leaf")  # callback


class TwoInputs(Subclassed):
    def call(self, images, more):
        return self.dense(self.flat(images + more))


class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return y_pred["loss"]  # loss


def fall(values):
    raise RuntimeError("a leaf fell off")  # run


def model(image_shape, num_classes, how, **_):
    flat, logits = keras.layers.Flatten(), keras.layers.Dense(num_classes)
    if how == "subclassed":
        return Subclassed(num_classes)
    if how == "fails":
        return Subclassed(num_classes, fails=True)
    if how == "takes two":
        return TwoInputs(num_classes)
    if how == "unbuilt":
        return keras.Sequential([flat, logits])
    if how == "five":
        return keras.Sequential([flat, keras.layers.Dense(5)])
    if how == "none":
        return None
    images = keras.Input((28, 28, 1) if how == "other size" else image_shape)
    features = flat(Layer(how)(images))
    if how == "two outputs":
        return keras.Model(images, [logits(features), logits(features)])
    return (OwnLoss if how == "loss" else keras.Model)(images, logits(features))


def data(how, **_):
    if how == "none":
        return None
    if how == "missing":
        return np.load("nowhere.npy")  # missing
    if how == "value":
        return np.zeros(7).reshape(3, 4)  # value
    if how == "gap":
        return from_arrays(np.zeros([4, 6, 6]), np.array([0, 1, None, 2]))
    source = leaves.leaves()
    if how == "dataset":
        return tf.data.Dataset.range(4)
    training, augmentation = source.training, mapped if how == "trace" else rotated
    source.training = lambda request: training(request).map(augmentation)
    return source


def mapped(images, labels):
    raise IndexError("no such pixel")  # mapped


def rotated(images, labels):
    def turn(values):
        raise RuntimeError("a leaf fell off")

    return tf.ensure_shape(tf.numpy_function(turn, [images], tf.float32), images.shape), labels
