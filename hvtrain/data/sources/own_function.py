"""A user's function that opens a shard of a data set, and what it returns, in one form."""

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from hvtrain.data.pipeline.epochs import seeded
from hvtrain.data.sources.examples import Examples
from hvtrain.data.sources.py_dataset import PyBatches
from hvtrain.errors import ConfigError, DataError, UserError, in_one_line, place_of

log = logging.getLogger(__name__)

REQUIRED = ("shard", "num_shards")
DEFAULTS: Mapping[str, Any] = {"split": "train", "epoch": 0, "seed": 0, "start": 0, "batch_size": 1}
"""What a function may declare besides, and what it gets where its examples are counted."""


class OwnFunction:
    """The function, called with those arguments that it declares.

    failure is the last error that a call raised: TensorFlow, which makes some of the calls, keeps only its text.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        inner = function.func if isinstance(function, partial) else function
        self.name = name or f"{inner.__module__}.{getattr(inner, '__qualname__', type(inner).__name__)}"
        self.file = getattr(getattr(inner, "__code__", None), "co_filename", "a function")
        self.failure: UserError | None = None
        self.has_told = False  # What is worth a line in the log.
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        known = (*REQUIRED, *DEFAULTS)
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self.declared = set(known) if takes_all else {one.name for one in parameters} & set(known)
        if missing := [name for name in REQUIRED if name not in self.declared]:
            raise ConfigError(
                f"{self.name} takes no {' and no '.join(missing)}; it must return a part of the data for each shard"
            )
        for one in parameters:
            named = one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
            if one.default is one.empty and named and one.name not in known:
                raise ConfigError(
                    f"{self.name} needs {one.name}, which nothing gives (it may take {', '.join(known)}); "
                    f"set it with functools.partial"
                )

    def call(self, shard: int, num_shards: int, split: str) -> str:
        """A call in words, to begin messages."""
        of = f", split={split!r}" if "split" in self.declared else ""
        return f"{self.name}(shard={shard}, num_shards={num_shards}{of})"

    def open(self, shard: int, num_shards: int, split: str, **values: Any) -> Examples | PyBatches | None:
        """What the function returns; None if it returns that.

        Raises ConfigError if it fails, DataError for anything else.
        """
        values = {**DEFAULTS, **values, "shard": shard, "num_shards": num_shards, "split": split}
        call = self.call(shard, num_shards, split)
        try:
            with seeded(values["seed"], values["epoch"]):
                found = self._function(**{name: values[name] for name in self.declared})
                if isinstance(found, tf.data.Dataset):
                    return Examples(found, call)
                if isinstance(found, keras.utils.PyDataset):
                    return PyBatches(found, call, self.fail)
        except UserError as error:
            raise self.fail(error) from error.__cause__
        except Exception as error:
            place = place_of(error)
            said = f"{in_one_line(error)}{f' ({place})' if place else ''}; tracebacks=true shows its traceback"
            raise self.fail(ConfigError(f"{call} failed: {said}")) from error
        if found is not None:
            needed = "a tf.data.Dataset or a keras.utils.PyDataset is needed"
            raise self.fail(DataError(f"{call} returned a {type(found).__name__}; {needed}"))
        return None

    def fail(self, error: UserError) -> UserError:
        """Notes an error, and returns it."""
        self.failure = error
        return error


class Shard:
    """A shard through the epochs of one stream. A PyDataset is kept for all, unless the function declares epoch.

    place: (shard, num_shards, split). shuffled: batches of a PyDataset come in another order in each epoch.
    """

    def __init__(
        self, function: OwnFunction, place: tuple[int, int, str], shuffled: bool, values: Mapping[str, Any]
    ) -> None:
        self._function, self._place, self._shuffled, self._values = function, place, shuffled, values
        self.split, self.call = place[-1], function.call(*place)
        self._kept: PyBatches | None = None

    def epoch(self, epoch: int, start: int) -> tuple[tf.data.Dataset, int | None]:
        """The examples of an epoch from that one on; and the number of all of them, if it is known."""
        part: Examples | PyBatches | None = self._kept
        if self._kept is None or self._kept.epoch > epoch:
            part = self._function.open(*self._place, epoch=epoch, start=start, **self._values)
        if part is None:
            raise self._function.fail(DataError(f"{self.call} returned None, and examples were expected"))
        if isinstance(part, PyBatches):
            self._kept = None if "epoch" in self._function.declared else part
            order = (self._values["seed"], epoch) if self._shuffled else None
            return part.go_to(epoch).examples(start, order), part.count()
        left_out = start if "start" in self._function.declared else 0
        self._tell(part, start - left_out)
        number = part.count()
        return part.examples(start - left_out), None if number is None else number + left_out

    def _tell(self, part: Examples, start: int) -> None:
        """Logs, once, what the pipeline costs or cannot do."""
        if self._function.has_told or not self._shuffled:
            return
        self._function.has_told, name = True, self._function.name
        if start:
            advice = "a function that declares start can leave them out itself"
            log.info(
                "%s: the first %s examples of the epoch are read again and dropped; %s", name, f"{start:,}", advice
            )
        if "epoch" not in self._function.declared and not part.shuffles:
            log.warning("%s: it neither shuffles nor declares epoch, so all epochs may come in one order", name)
        if not part.is_deterministic:
            log.warning("%s: deterministic=False was found, so a resumed run will not end with the same bits", name)
