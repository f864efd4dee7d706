"""Training that continues when ranks are lost or join: Horovod's elastic interface, on Keras 3.

docs/library.md has an example. `run` calls the decorated function again: from the last commit after
a rank was lost, from the current state after ranks joined. A joining rank runs the code before that
call on its own, so that code must not use collectives. Create all optimizers in that code, not in the function,
because messages are numbered in the order in which a rank first steps its optimizers. Leave out
BroadcastGlobalVariablesCallback, which broadcasts only once per process: KerasState.sync broadcasts
after each reset.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from horovod.common.elastic import ObjectState, State, run_fn
from keras.callbacks import Callback

from hvtrain.keras.collectives import assign_mean, broadcast_variables, built_optimizer
from hvtrain.keras.hooks import hook_of
from hvtrain.keras.in_graph import END_OF_EPOCH
from hvtrain.keras.process import raise_for_elastic
from hvtrain.keras.reduction import restart_numbering
from hvtrain.keras.same_gradients import forget_comparisons

T = TypeVar("T")


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates func(state, ...) so that it is called again whenever ranks are lost or join.

    Every rank calls it. After an error in one of Horovod's operations the state is restored to the last
    commit; any other error is raised unchanged.
    """

    @functools.wraps(func)
    def wrapper(state, *args, **kwargs):
        with raise_for_elastic():
            return func(state, *args, **kwargs)

    return run_fn(wrapper, _restart)


def _restart() -> None:
    # Not hvtrain.keras.init, which expects the launcher's number of ranks.
    hvd.shutdown()
    hvd.init()
    forget_comparisons()


class KerasState(ObjectState):
    """State that must be equal on all ranks: weights, the optimizer's variables, and attributes.

    Each rank keeps its own seeds for dropout and other random layers. After a reset Keras retraces its
    functions, because the number of ranks is a constant in their graphs. For the same reason, create
    your own tf.functions inside the function that `run` repeats.

    Args:
        model: a built Keras model.
        optimizer: the model's optimizer; None: the one that the model is compiled with.
        kwargs: further values to keep in sync, such as batch=0, epoch=0; they become attributes of
            this object. Each commit makes deep copies, so restore also undoes changes inside a list.

    Raises:
        ValueError: if the model is not built and so has no weights yet; if its optimizer's slots are
            sharded; or if the optimizer has state that a joining rank would lack.
    """

    def __init__(
        self, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None, **kwargs: Any
    ) -> None:
        if not model.built:
            raise ValueError(
                f"{model.name} is not built and has no weights to keep; call model.build(input_shape)"
            )
        self.model = model
        self.optimizer = built_optimizer(model, optimizer)
        hook = hook_of(self.optimizer)
        if hook and hook.reducer.gathers_weights:
            raise ValueError(
                "KerasState cannot keep sharded slots, since a lost rank takes its part with it; leave out shard=True"
            )
        keeps_errors = hook and getattr(hook.reducer.compression, "keeps_errors", False)
        if keeps_errors or getattr(hook, "outer", None):
            raise ValueError(
                "KerasState cannot keep the errors of a compression or the anchors of DiLoCo, which a joining rank "
                "would lack; use Compression.bf16, or LocalSGD"
            )
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **kwargs)
        self.save()

    def save(self) -> None:
        """Copies the state to host memory."""
        values = [variable.numpy() for variable in self._variables()]
        attributes = copy.deepcopy(self._attributes())
        # Assigned together, after everything that can fail, so that two commits are never mixed.
        self._saved_values, self._saved_state = values, attributes

    def restore(self) -> None:
        """Restores the last commit, bit for bit."""
        for variable, value in zip(self._variables(), self._saved_values, strict=True):
            variable.assign(value)
        self.__dict__.update(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Broadcasts the state of rank 0, and saves it (every rank).

        Partly accumulated gradients are averaged instead, so that no rank's are lost.
        """
        with raise_for_elastic():
            self._average_accumulated()
            variables = self._variables()
            if variables:
                broadcast_variables(variables, root_rank=0)
            hook = hook_of(self.optimizer)
            if hook:
                hook.on_weights_set()
            attributes = hvd.broadcast_object(
                self._attributes(), root_rank=0, name="hvtrain.elastic"
            )
            self.__dict__.update(attributes)
        self.save()

    def reset(self) -> None:
        """Makes Keras retrace its functions: the number of ranks is a constant in their graphs."""
        self.model.train_function = None
        self.model.test_function = None
        self.model.predict_function = None

    def _average_accumulated(self) -> None:
        """Sets gradients that are accumulated for the next step to their mean over the ranks (every rank).

        The broadcast alone would replace the other ranks' gradients with those of rank 0. A rank that has
        just joined has accumulated none and does not count.
        """
        optimizer = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        accumulation_steps = getattr(optimizer, "gradient_accumulation_steps", None)
        if not accumulation_steps:
            return
        # Keras's _iterations also counts the calls that only accumulate.
        calls = hvd.allgather_object(int(optimizer._iterations), name="hvtrain.accumulated")
        if calls[0] % accumulation_steps == 0:
            return
        ranks = [rank for rank, num_calls in enumerate(calls) if num_calls == calls[0]]
        for accumulator in optimizer._accumulated_gradients:
            assign_mean(accumulator, ranks)

    def _variables(self) -> list[tf.Variable]:
        variables = list(self.model.weights)
        if self.optimizer is not None:
            variables += self.optimizer.variables
        return [variable.value for variable in variables]

    def _attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}


TensorFlowKerasState = KerasState  # The name in horovod.tensorflow.elastic.


class RestartingState(State):
    """Repeats a function after ranks are lost or join, for a program that keeps its own state.

    All ranks, including new ones, start at the beginning of the function, so that none waits in a
    collective that others never enter. The function may create optimizers. It must call
    check_host_updates (every rank), which restarts it if ranks are joining or leaving.
    """

    def __init__(self) -> None:
        super().__init__(
            bcast_object=functools.partial(hvd.broadcast_object, name="hvtrain.resets"),
            get_rank=hvd.rank,
        )

    def run_with_restarts(self, func: Callable[[], T]) -> T:
        """Calls func until it completes, and returns its result (every rank).

        After an error in one of Horovod's operations func is repeated; other errors are raised unchanged.
        """
        return run(lambda _: func())(self)

    def reset(self) -> None:
        restart_numbering()

    def save(self) -> Any:
        """Does nothing: the program keeps its own state."""

    # Horovod's elastic loop calls these two as well.
    restore = sync = save


class _StateCallback(Callback):
    """Base of the callbacks that update or commit an elastic state."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state


class CommitStateCallback(_StateCallback):
    """Commits the state every batches_per_commit batches and after each epoch (every rank).

    It commits when the next batch or epoch begins, or at the end of fit, because by then all callbacks
    have updated the state, whatever their order. It never commits between an epoch's last batch and the
    epoch's end: to resume from there, fit would have to run an epoch without batches.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        self.batches_per_commit = batches_per_commit

    def commit(self) -> None:
        self.state.commit()

    def on_train_begin(self, logs: Any = None) -> None:
        # fit starts over after each reset, so all ranks count from the same batch.
        self.batches_remaining = self.batches_per_commit
        self._epoch_ended = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # With steps_per_execution, one call covers several batches.
        self.batches_remaining -= batch - self._first_batch + 1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.batches_remaining <= 0:
            self.batches_remaining = self.batches_per_commit
            self.commit()
        self._first_batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epoch_ended = True

    def on_epoch_begin(self, epoch: int | None, logs: Any = None) -> None:
        if self._epoch_ended:
            self._epoch_ended = False
            self.batches_remaining = self.batches_per_commit
            self.commit()

    def on_train_end(self, logs: Any = None) -> None:
        self.on_epoch_begin(None)


class UpdateBatchStateCallback(_StateCallback):
    """Counts the batches done in the current epoch in state.batch; resets it to 0 at the epoch's end.

    The first epoch after a reset has only the remaining steps, but at least one. Pass fit the
    steps_per_epoch of a whole epoch, and data that starts at batch state.batch. If the number of
    steps in an epoch depends on the number of ranks, rescale state.batch before fit.

    Horovod's callback stores the index of the last batch since the reset instead. So it repeats one batch,
    and after a second reset in the same epoch it forgets the batches before the first.

    Raises:
        ValueError: at the start of fit, if Keras does not know the steps in an epoch.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.params.get("steps"):
            raise ValueError(
                "Keras does not know the number of steps in an epoch, so an epoch could not resume after a reset; "
                "pass steps_per_epoch to fit"
            )
        # LearningRateScheduleCallback reads it too.
        self.model._hvtrain_batches_done = self.state.batch
        # Still True if a rank was lost between the last batch of an epoch and its end.
        self.model._hvtrain_epoch_is_done = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        done_before = self.model._hvtrain_batches_done
        self.state.batch = done_before + batch + 1
        # Callbacks cannot shorten the epoch itself: fit reads the number of steps before it calls
        # them. But fit checks stop_training after each batch and again after the epoch, so setting
        # it here and clearing it in on_epoch_end ends only the epoch.
        is_done = bool(done_before) and self.state.batch >= self.params["steps"]
        # For StopTogetherCallback, if a callback before this one has asked to stop.
        self.model._hvtrain_epoch_is_done = is_done
        if is_done and not self.model.stop_training:
            self.model.stop_training = END_OF_EPOCH

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0
        self.model._hvtrain_batches_done = 0
        self.model._hvtrain_epoch_is_done = False
        if self.model.stop_training is END_OF_EPOCH:
            self.model.stop_training = False


class UpdateEpochStateCallback(_StateCallback):
    """Updates state.epoch, the number of epochs done, including those before resets.

    Works with both ways of resuming: fit(epochs=all - state.epoch), and
    fit(initial_epoch=state.epoch, epochs=all), which also gives other callbacks the true epoch.
    """

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # Not computed from `epoch`, whose first value depends on how fit resumed.
        self.state.epoch += 1
