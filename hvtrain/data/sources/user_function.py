"""A user's function that opens shards of a data set, and the epochs of one shard."""

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvtrain.data.pipeline.epochs import seeded
from hvtrain.data.sources.user_examples import (
    PipelineExamples,
    PyDatasetExamples,
)
from hvtrain.errors import (
    ConfigError,
    DataError,
    UserError,
    in_one_line,
    place_of,
)

log = logging.getLogger(__name__)

REQUIRED = ("shard", "num_shards")
# More arguments that a function may declare, and their values where its examples are counted.
DEFAULTS: Mapping[str, Any] = {
    "split": "train",
    "epoch": 0,
    "seed": 0,
    "start": 0,
    "batch_size": 1,
}


class ShardKey(NamedTuple):
    """Names a shard."""

    shard: int
    """Its number, from 0 to num_shards - 1."""
    num_shards: int
    split: str


class UserFunction:
    """The function, called with those arguments that it declares.

    Args:
        function: the user's; see from_dataset().
        name: of the data set; by default that of the function.

    Attributes:
        declared: names of the arguments that it takes, among those that it may take.
        failure: the last error that a call raised. TensorFlow, which makes some of the calls,
            keeps only its text.
        has_logged: whether the log says what the function's pipelines cost or cannot do.

    Raises:
        ConfigError: if it does not take a shard and num_shards, or needs other arguments.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        # functools.partial hides the function's name and file.
        inner = function.func if isinstance(function, partial) else function
        # A callable object has no name, so its class is named.
        inner_name = getattr(inner, "__qualname__", type(inner).__name__)
        self.name = name or f"{inner.__module__}.{inner_name}"
        self.file = getattr(getattr(inner, "__code__", None), "co_filename", "a function")
        self.failure: UserError | None = None
        self.has_logged = False
        self._function = function

        known = {*REQUIRED, *DEFAULTS}
        parameters = inspect.signature(function).parameters.values()
        # **kwargs accepts all arguments.
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        names = {parameter.name for parameter in parameters}
        self.declared = known if takes_all else names & known

        missing = [name for name in REQUIRED if name not in self.declared]
        if missing:
            raise ConfigError(
                f"{self.name} takes no {' and no '.join(missing)}; it must return a part of the data for each shard"
            )

        for parameter in parameters:
            is_named = parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            )
            is_needed = is_named and parameter.default is parameter.empty
            if is_needed and parameter.name not in known:
                raise ConfigError(
                    f"{self.name} needs {parameter.name}, which nothing gives (it may take "
                    f"{', '.join((*REQUIRED, *DEFAULTS))}); set it with functools.partial"
                )

    def call_in_words(self, key: ShardKey) -> str:
        """Returns a call as it would be written, to begin messages."""
        split = f", split={key.split!r}" if "split" in self.declared else ""
        return f"{self.name}(shard={key.shard}, num_shards={key.num_shards}{split})"

    def open(self, key: ShardKey, **values: Any) -> PipelineExamples | PyDatasetExamples | None:
        """Calls the function.

        Args:
            key: of the shard.
            values: other arguments; those that are left out are the DEFAULTS.

        Returns:
            The shard's examples, or None if the function returns that.

        Raises:
            ConfigError: if it fails.
            DataError: if it returns anything else.
        """
        values = {**DEFAULTS, **values, **key._asdict()}
        call = self.call_in_words(key)
        try:
            # Then a shuffle has the same order whenever this epoch is opened.
            with seeded(values["seed"], values["epoch"]):
                shard = self._function(**{name: values[name] for name in self.declared})
                if isinstance(shard, tf.data.Dataset):
                    return PipelineExamples(shard, call)
                if isinstance(shard, keras.utils.PyDataset):
                    return PyDatasetExamples(shard, call, self.fail)
        except UserError as error:
            # Its message says what is wrong; a line of the user's code would add nothing.
            raise self.fail(error) from error.__cause__
        except Exception as error:  # The user's code may raise anything.
            cause = in_one_line(error)
            location = place_of(error)
            if location:
                cause = f"{cause} ({location})"
            message = f"{call} failed: {cause}; tracebacks=true shows its traceback"
            raise self.fail(ConfigError(message)) from error

        if shard is None:
            return None
        message = f"{call} returned a {type(shard).__name__}; a tf.data.Dataset or a keras.utils.PyDataset is needed"
        raise self.fail(DataError(message))

    def fail(self, error: UserError) -> UserError:
        """Notes an error, and returns it."""
        self.failure = error
        return error


class ShardReader:
    """Opens a shard for each epoch of one stream.

    A PyDataset is opened once and kept, unless the function declares epoch.

    Args:
        function: the user's.
        key: of the shard.
        shuffled: True if batches of a PyDataset come in another order in each epoch.
        values: more arguments for the function, equal in all epochs, such as the seed.
    """

    def __init__(
        self,
        function: UserFunction,
        key: ShardKey,
        shuffled: bool,
        values: Mapping[str, Any],
    ) -> None:
        self.key = key
        self.call = function.call_in_words(key)
        self._function = function
        self._shuffled = shuffled
        self._values = values
        # The PyDataset, if the next epoch continues with it.
        self._kept: PyDatasetExamples | None = None

    def open_epoch(self, epoch: int, start: int) -> tuple[tf.data.Dataset, int | None]:
        """Opens the shard's examples from `start` on.

        Returns:
            The examples, and the number of all of them in the epoch; None if it is not known.
        """
        shard = self._open(epoch, start)
        if isinstance(shard, PyDatasetExamples):
            # A function that declares epoch is called for each one.
            if "epoch" not in self._function.declared:
                self._kept = shard
            seed = (self._values["seed"], epoch) if self._shuffled else None
            return shard.go_to(epoch).examples(start, seed), shard.count()

        # A function that declares start has left these examples out itself.
        num_left_out = start if "start" in self._function.declared else 0
        self._log_limits(shard, start - num_left_out)
        number = shard.count()
        if number is not None:
            number += num_left_out
        return shard.examples(start - num_left_out), number

    def _open(self, epoch: int, start: int) -> PipelineExamples | PyDatasetExamples:
        """Opens the shard for an epoch, or returns the PyDataset that is kept."""
        # A PyDataset cannot go back. If a stream is read again from its start, a new one is opened.
        if self._kept and self._kept.epoch <= epoch:
            return self._kept

        shard = self._function.open(self.key, epoch=epoch, start=start, **self._values)
        if shard is None:
            message = f"{self.call} returned None, and examples were expected"
            raise self._function.fail(DataError(message))

        return shard

    def _log_limits(self, shard: PipelineExamples, num_dropped: int) -> None:
        """Logs, once for a function, what its pipelines cost or cannot do."""
        if self._function.has_logged or not self._shuffled:
            return

        self._function.has_logged = True
        name = self._function.name

        if num_dropped:
            log.info(
                "%s: the first %s examples of the epoch are read again and dropped; a function "
                "that declares start can leave them out itself",
                name,
                f"{num_dropped:,}",
            )

        if "epoch" not in self._function.declared and not shard.shuffles:
            log.warning(
                "%s: it neither shuffles nor declares epoch, so all epochs may come in one order",
                name,
            )

        if not shard.is_deterministic:
            log.warning(
                "%s: deterministic=False was found, so a resumed run will not end with the same bits",
                name,
            )
