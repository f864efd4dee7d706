"""Runs on each rank: hvtrain.keras.elastic. argv: folder for the JSON that each rank leaves, scenario.

alone and static start under any launcher; heir and exchange on 2 ranks under the elastic one.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import fast_keras  # noqa: F401
import keras
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

import hvtrain.keras as hvd
from hvtrain.keras import elastic

FOLDER, SCENARIO = Path(sys.argv[1]), sys.argv[2]
signal.alarm(140)  # whatever hangs ends

STEPS, EPOCHS, COMMIT = 10, 3, 4  # commits after 4, 8, 10, 14, ... batches
KILLS = {"exchange": (7, 1), "heir": (17, 0)}  # before that step, that rank
RNG = np.random.default_rng(5)
# A batch of 8 for each step and rank; steps beyond the last begin again.
X = RNG.normal(size=(64, 2, 8, 4)).astype("float32")
Y = RNG.integers(0, 3, (64, 2, 8))


def net(seed, optimizer, **extra):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)]
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **extra)
    return model


def adam():
    return keras.optimizers.Adam(0.02)


def everything(model):
    return [np.array(variable.numpy()) for variable in [*model.weights, *model.optimizer.variables]]


def distance(ours, others):
    return max(
        float(np.max(np.abs(a.astype("float64") - b))) for a, b in zip(ours, others, strict=True)
    )


def replayed(sizes):
    """One process without Horovod that saw, at each step, the joint batch of that many ranks."""
    model = net(0, adam())
    for step, size in enumerate(sizes):
        model.train_on_batch(X[step % 64, :size].reshape(-1, 4), Y[step % 64, :size].reshape(-1))
    return everything(model)


class Story(keras.callbacks.Callback):
    """Writes into the state how many ranks took part in each step, and runs the scenario."""

    def __init__(self, state, before=lambda state, model: None):
        super().__init__()
        self.state = state
        self.before = before

    def on_train_batch_begin(self, batch, logs=None):
        self.before(self.state, self.model)

    def on_train_batch_end(self, batch, logs=None):
        self.state.sizes.append(hvd.size())


def exchange_ranks(state, model):
    """Kills the rank whose turn it is; a rank that is alone asks for another."""
    if hvd.size() == 2 and (len(state.sizes), hvd.rank()) == KILLS[SCENARIO]:
        os.kill(os.getpid(), signal.SIGKILL)
    if hvd.size() == 1 and SCENARIO == "exchange":
        time.sleep(0.1)
        if len(state.sizes) == 7:
            (FOLDER / "hosts").write_text("localhost:1\n127.0.0.1:1\nLocalhost:1\n")


def trained(state, begun, before=lambda state, model: None, extra=(), epochs=EPOCHS):
    @elastic.run
    def train(state):
        begun.append([len(state.sizes), hvd.size()])
        first = state.epoch * STEPS + state.batch
        assert first == len(state.sizes)
        mine = (
            tf.data.Dataset.from_tensor_slices((X[:, hvd.rank()], Y[:, hvd.rank()]))
            .repeat()
            .skip(first)
        )
        state.model.fit(
            mine, steps_per_epoch=STEPS, initial_epoch=state.epoch, epochs=epochs, verbose=0,
            callbacks=[  # in the order that is hardest for them
                elastic.CommitStateCallback(state, COMMIT), elastic.UpdateBatchStateCallback(state),
                elastic.UpdateEpochStateCallback(state), Story(state, before), *extra,
            ],
        )  # fmt: skip

    train(state)


def new_state(seed):
    model = net(seed, hvd.DistributedOptimizer(adam()))
    return elastic.KerasState(model, batch=0, epoch=0, sizes=[])


def lost_or_joined():
    """A whole training in which ranks go or come."""
    # Seeds differ, so that weights are equal only where they were sent.
    state, begun = new_state(hvd.rank()), []
    if SCENARIO == "exchange":
        # The end is counted from where the new rank joined, which is a matter of seconds.
        stop = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: stop_when_grown(state)
        )
        trained(state, begun, exchange_ranks, [stop], epochs=1000)
    else:
        trained(state, begun, exchange_ranks)
    # What the weights would be had the survivor not gone back to the commit.
    otherwise = [2] * KILLS[SCENARIO][0] + state.sizes[KILLS[SCENARIO][0] :]
    final = everything(state.model)
    return {
        "begun": begun,
        "sizes": state.sizes,
        "done": [state.epoch, state.batch],
        "error": distance(final, replayed(state.sizes)),
        "error_otherwise": distance(final, replayed(otherwise)),
        "weights": [array.tolist() for array in final],
    }


def stop_when_grown(state):
    if state.sizes[-9:] == [2] * 9:
        state.model.stop_training = True


def static():
    """The state alone, on ranks that stay."""
    state = new_state(hvd.rank())
    model = state.model
    state.epoch, state.sizes = 3 + hvd.rank(), [hvd.rank()]
    model.optimizer.learning_rate = 0.02 * (hvd.rank() + 1)
    model.fit(X[0, 0], Y[0, 0], epochs=1 if hvd.size() == 1 else 2, verbose=0)
    for variable in model.optimizer.variables[2:]:
        variable.assign(variable + hvd.rank())
    before = everything(model)
    state.sync()
    synced = everything(model)
    attributes = [state.batch, state.epoch, list(state.sizes)]
    everyone = hvd.allgather_object([synced, attributes])
    from_root = hvd.broadcast_object(before, 0)

    def go_on():
        model.fit(X[1, hvd.rank()], Y[1, hvd.rank()], verbose=0)
        state.batch += 1
        state.sizes.append("lost")

    go_on()
    moved = distance(synced, everything(model))
    state.restore()
    restored = all(np.array_equal(a, b) for a, b in zip(synced, everything(model), strict=True))
    restored_attributes = [state.batch, state.epoch, list(state.sizes)]
    go_on()
    state.sizes = ["kept"]
    state.commit()
    committed = everything(model)
    state.sizes.append("lost")
    go_on()
    state.restore()
    return {
        "start_differs": distance(before, from_root),
        "synced_to_root": all(np.array_equal(a, b) for a, b in zip(synced, from_root, strict=True)),
        "equal_on_all": all(
            np.array_equal(a, b)
            for other in everyone
            for a, b in zip(other[0], everyone[0][0], strict=True)
        ),
        "attributes": [other[1] for other in everyone],
        "rate": float(model.optimizer.learning_rate),
        "iterations": int(model.optimizer.iterations),
        "moved": moved,
        "restored": restored,
        "restored_attributes": restored_attributes,
        "kept": all(
            np.array_equal(a, b) for a, b in zip(committed, everything(model), strict=True)
        ),
        "kept_attributes": [state.batch, state.sizes],
        "raised": [raised(error) for error in OTHERS],
    }


# None of them means a lost rank. In the second, the word is in a path; the third would be met again forever.
OTHERS = [
    tf.errors.InvalidArgumentError(
        None, None, "Expected image (JPEG, PNG, or GIF), got unknown format"
    ),
    tf.errors.UnknownError(None, None, "RuntimeError: out of leaves, in /home/me/horovod/data.py"),
    tf.errors.FailedPreconditionError(
        None, None, "Mismatched allreduce tensor shapes [[{{node HorovodAllreduce}}]]"
    ),
    ValueError("Horovod has been shut down, said the user"),
]


def raised(error):
    """What comes out of run when the function raises this, and how often it was called."""
    calls = []

    @elastic.run
    def train(state):
        calls.append(state)
        raise error

    try:
        train(elastic.KerasState(net(0, adam())))
    except Exception as caught:
        return [caught is error, len(calls)]
    return [False, len(calls)]


def alone():
    """One rank, without a launcher; resets come from a callback."""
    state, begun, pending = (
        new_state(0),
        [],
        {3: HostsUpdatedInterrupt(True), 17: HorovodInternalError("gone")},
    )
    pending |= {7: HostsUpdatedInterrupt(False), 29: HorovodInternalError("gone")}

    def interrupt(state, model):
        if len(state.sizes) in pending:
            error = pending.pop(len(state.sizes))
            if isinstance(error, HostsUpdatedInterrupt):
                state.save()  # as commit does before it raises
            raise error

    trained(state, begun, interrupt)
    return {
        "begun": begun,
        "sizes": state.sizes,
        "done": [state.epoch, state.batch],
        "error": distance(everything(state.model), replayed(state.sizes)),
        "early_stop": early_stop(),
        "all_but_initial_epoch": all_but_initial_epoch(),
        "messages": messages(),
        "raised": [raised(error) for error in OTHERS],
        "broken": broken(),
    }


def early_stop():
    """A callback that stops in the epoch that is shortened stops the training, whichever comes first."""
    epochs = []
    for is_first in (True, False):
        state = new_state(0)
        state.batch, state.sizes = 4, [1] * 4
        state.save()
        stop = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs, model=state.model: setattr(
                model, "stop_training", True
            )
        )
        update = elastic.UpdateBatchStateCallback(state)
        data = tf.data.Dataset.from_tensor_slices((X[:, 0], Y[:, 0])).repeat()
        history = state.model.fit(
            data,
            steps_per_epoch=STEPS,
            epochs=3,
            verbose=0,
            callbacks=[stop, update] if is_first else [update, stop],
        )
        epochs.append([len(history.epoch), int(state.model.optimizer.iterations)])
    return epochs


def all_but_initial_epoch():
    """Upstream's way to go on: fit(epochs=all - state.epoch)."""
    state = new_state(0)
    state.epoch = 2
    update = elastic.UpdateEpochStateCallback(state)
    state.model.fit(X[0, 0], Y[0, 0], epochs=5 - state.epoch, verbose=0, callbacks=[update])
    return state.epoch


def messages():
    lines = []
    unbuilt = keras.Sequential([keras.layers.Dense(2)], name="unbuilt")
    unknown = tf.data.Dataset.from_generator(
        lambda: iter([(X[0, 0], Y[0, 0])]), (tf.float32, tf.int64)
    )
    state = new_state(0)
    for attempt in (
        lambda: elastic.KerasState(unbuilt, batch=0),
        lambda: state.model.fit(
            unknown, verbose=0, callbacks=[elastic.UpdateBatchStateCallback(state)]
        ),
    ):
        try:
            attempt()
        except ValueError as error:
            lines.append(str(error))
    return lines


def broken():
    """Each way in which TensorFlow tells of a lost rank leads back to the commit, and on."""
    state, batches = new_state(0), []
    pending = [
        "Horovod has been shut down. This was caused by an exception [[{{node adam/hvtrain_gradients_0_0}}]]",
        "[/src/gloo/transport/tcp/pair.cc:598] Connection closed by peer [127.0.0.1]:1 [[{{node gradients}}]]",
        "{{function_node __wrapped__HorovodBroadcast_device_/job:localhost}} Timed out [Op:HorovodBroadcast]",
    ]

    @elastic.run
    def train(state):
        batches.append(state.batch)
        state.batch = 5
        if pending:
            raise tf.errors.UnknownError(None, None, pending.pop())
        return "done"

    return [train(state), batches]


hvd.init()
results = {"alone": alone, "static": static}.get(SCENARIO, lost_or_joined)()
(FOLDER / f"end-{hvd.rank()}.json").write_text(json.dumps({**results, "size": hvd.size()}))
