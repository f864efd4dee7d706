"""A user's own package: a model, a data set, and ways in which either can fail on one rank."""

import os
import signal
from dataclasses import replace

import keras
import numpy as np

from hvtrain.core.topology import Topology
from hvtrain.data import from_arrays
from hvtrain.strategies.horovod import HorovodStrategy
from hvtrain.training.trackers import Tracker


def tiny(
    image_shape,
    num_classes,
    units=8,
    fail_on_rank=None,
    nan_on_rank=None,
    loss_on_rank=None,
    norm=False,
    root_on_rank=None,
    huge_on_rank=None,
):
    inputs = keras.Input(image_shape, name="image")
    features = keras.layers.Dense(units, activation="relu", name="hidden")(
        keras.layers.Flatten(name="flat")(inputs)
    )
    features = keras.layers.BatchNormalization(name="norm")(features) if norm else features
    features = (
        FailsAtStep(fail_on_rank, name="fails")(features) if fail_on_rank is not None else features
    )
    features = (
        BreaksAtStep(nan_on_rank, name="breaks")(features) if nan_on_rank is not None else features
    )
    features = Root(root_on_rank, name="root")(features) if root_on_rank is not None else features
    features = Huge(huge_on_rank, name="huge")(features) if huge_on_rank is not None else features
    features = (
        InfiniteLoss(loss_on_rank, name="loss")(features) if loss_on_rank is not None else features
    )
    return keras.Model(
        inputs,
        keras.layers.Dense(num_classes, name="logits", dtype="float32")(features),
        name="tiny",
    )


def loads_by_itself(image_shape, num_classes, weights=None, **options):
    return tiny(image_shape, num_classes)


def leaves(
    num_examples=400,
    num_test=51,
    num_validation=0,
    fail_on_rank=None,
    same_data="no",
    spoiled_on_rank=None,
):
    """Leaves whose brightest corner is their class."""
    if fail_on_rank is not None and fail_on_rank == _rank():
        raise RuntimeError("leaves are wet on this rank")
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 4, num_examples + num_test)
    images = rng.integers(0, 120, (len(labels), 6, 6, 1)).astype("uint8")
    images[
        np.arange(len(labels)), np.array([0, 0, 5, 5])[labels], np.array([0, 5, 0, 5])[labels]
    ] = 255
    split = num_examples
    source = from_arrays(
        images[:split],
        labels[:split],
        images[split:],
        labels[split:],
        name="leaves",
        num_validation=num_validation,
        num_classes=4,  # Also of one example, whose label is 3.
    )
    if same_data != "no":
        shared = source.training
        source.training = lambda request: shared(
            replace(request, topology=Topology(0, request.topology.size))
        )
        source.same_on_all_ranks = same_data == "meant"
    if spoiled_on_rank is not None and spoiled_on_rank == _rank():
        unspoiled = source.training
        source.training = lambda request: spoiled(unspoiled(request), request.start_step)
    return source


def spoiled(batches, start_step):
    """The batches of a rank, with NaN in example 5 of its third batch."""
    import tensorflow as tf

    def spoil(number, batch):
        is_bad = tf.logical_and(number + start_step == 2, tf.range(tf.shape(batch[0])[0]) == 5)
        return tf.where(is_bad[:, None, None, None], np.float32("nan"), batch[0]), *batch[1:]

    return batches.enumerate().map(spoil)


class Root(keras.layers.Layer):
    """A square root on one rank, whose gradient at 0 is infinite."""

    def __init__(self, rank, **kwargs):
        super().__init__(**kwargs)
        self.rank = rank

    def call(self, inputs):
        return keras.ops.sqrt(inputs) if self.rank == _rank() else inputs


class Huge(keras.layers.Layer):
    """Asks for a million gigabytes on one rank, for batches of 32 and more."""

    def __init__(self, rank, **kwargs):
        super().__init__(**kwargs)
        self.rank = rank

    def call(self, inputs):
        import tensorflow as tf

        is_large = tf.logical_and(tf.shape(inputs)[0] >= 32, self.rank == _rank())
        size = tf.where(is_large, tf.constant(2**48, tf.int64), 1)
        return inputs + tf.reduce_max(tf.random.uniform([size])) * 0


class FailsAtStep(keras.layers.Layer):
    """Raises on one rank in the middle of the training."""

    def __init__(self, rank, **kwargs):
        super().__init__(**kwargs)
        self.rank = rank
        self.calls = 0

    def call(self, inputs):
        import tensorflow as tf

        def fail(values):
            self.calls += 1
            if self.calls > 5 and self.rank == _rank():
                raise RuntimeError("a leaf fell off")
            return values

        outputs = tf.numpy_function(fail, [inputs], tf.float32)
        return inputs + tf.stop_gradient(tf.reshape(outputs, tf.shape(inputs)) - inputs)


class BreaksAtStep(keras.layers.Layer):
    """Makes NaN on one rank from its sixth batch on."""

    def __init__(self, rank, **kwargs):
        super().__init__(**kwargs)
        self.rank = rank
        self.calls = 0

    def call(self, inputs, training=False):
        import tensorflow as tf

        def factor(_):
            self.calls += bool(training)
            return np.float32("nan" if self.calls > 5 and self.rank == _rank() else 1)

        return inputs * tf.cast(
            tf.reshape(tf.numpy_function(factor, [0.0], tf.float32), []), inputs.dtype
        )

    def compute_output_shape(self, input_shape):
        return input_shape


class InfiniteLoss(keras.layers.Layer):
    """Makes the loss of one rank infinite, but no gradient."""

    def __init__(self, rank, **kwargs):
        super().__init__(**kwargs)
        self.rank = rank

    def call(self, inputs):
        self.add_loss(keras.ops.convert_to_tensor(float("inf") if self.rank == _rank() else 0.0))
        return inputs


class Perturbs(keras.callbacks.Callback):
    """Changes a weight on one rank in the middle of the training."""

    def __init__(self, rank, batch, where="weight"):
        super().__init__()
        self.rank, self.batch, self.where = rank, batch, where

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch and self.rank == _rank():
            model = self.model
            group = (
                model.trainable_variables
                if self.where == "weight"
                else model.optimizer.variables[2:]
            )
            group[0].assign(group[0] + 1e-3)


class Fails(keras.callbacks.Callback):
    """Raises on one rank in the middle of the training."""

    def __init__(self, rank, batch):
        super().__init__()
        self.rank, self.batch = rank, batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch and self.rank == _rank():
            raise RuntimeError("a leaf fell off")


class FailsAtEnd(keras.callbacks.Callback):
    """Raises on all ranks after the last checkpoint, before the results."""

    def on_train_end(self, logs=None):
        raise RuntimeError("the last leaf fell off")


class Stops(keras.callbacks.Callback):
    """Wishes to stop, on one rank alone."""

    def __init__(self, rank, batch):
        super().__init__()
        self.rank, self.batch = rank, batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch and self.rank == _rank():
            self.model.stop_training = True


class Terminates(keras.callbacks.Callback):
    """Sends SIGTERM to one rank after a batch, as a scheduler does."""

    def __init__(self, rank, epoch, batch):
        super().__init__()
        self.rank = rank
        self.after = epoch, batch
        self.epoch = None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.after and self.rank == _rank():
            os.kill(os.getpid(), signal.SIGTERM)


class Disagrees(keras.callbacks.Callback):
    """Logs a number on which the ranks disagree: it gets worse on rank 0 and better on the others."""

    def on_epoch_end(self, epoch, logs=None):
        logs["mine"] = logs["my_loss"] = float(epoch if _rank() == 0 else -epoch)


class ForgetsToReduce(HorovodStrategy):
    """What Horovod's own optimizer does on Keras 3."""

    def distribute(self, optimizer, check_finite=False):
        return optimizer


def _rank():
    return int(os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def halved(epoch, rate):
    return rate / 2


def told(batch, logs):
    print("told of batch", batch)


class Notes(Tracker):
    """Notes in the run folder how the tracked run began and ended."""

    def start(self, run, known):
        self.file = run.folder / "notes.txt"
        self._add(f"start {known}")
        return "leaf"

    def scalars(self, step, values):
        self._add(f"step {step}")

    def finish(self, state, files):
        self._add(state)

    def _add(self, line):
        with self.file.open("a") as file:
            file.write(f"{line}\n")


class Needy(Tracker):
    """Needs what nobody has."""

    needs = ("json", "no_such_module", "nor_this")
    start = scalars = finish = None
