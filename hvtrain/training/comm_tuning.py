"""comm.tune=true: finds the settings of the reduction with which this model trains fastest on these ranks.

Horovod's own autotuner knows no cycle under 1 ms and no buckets, and tunes while it trains. This one takes some steps
of a copy of the model before the training begins, and keeps what it found in the run folder, for runs that go on. The
size of Horovod's fusion buffer is left alone: buckets say how large messages are, and Horovod 0.28.1 crashes when it is
started anew with both that size and a cycle.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import keras
import tensorflow as tf

from hvtrain.config.schema import RunConfig
from hvtrain.core.records import write_atomic
from hvtrain.errors import ConfigError
from hvtrain.keras.process import CYCLE
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.loop import make_steps
from hvtrain.training.run import Run

log = logging.getLogger(__name__)

FILE = "comm.json"
ROUNDS, STEPS = 3, 10
SECONDS_FOR_STEPS = 3.0
# Less than this may be noise; the default is what is known.
WORTHWHILE = 0.97


@dataclass(frozen=True)
class CommSettings:
    """cycle_ms: how often Horovod looks for gradients that are ready. bucket_mib: see HorovodStrategy."""

    cycle_ms: float = 1.0
    bucket_mib: float = 25.0

    @property
    def environment(self) -> dict[str, str]:
        """What Horovod reads when it starts."""
        return {CYCLE: f"{self.cycle_ms:g}"}


CYCLES_MS = (1.0, 0.5, 0.2, 0.1, 0.05)
BUCKETS_MIB = (25.0, 4.0)


def settings_of(config: RunConfig) -> CommSettings:
    """The settings that the run has without comm.tune."""
    if "HOROVOD_FUSION_THRESHOLD" in os.environ:
        raise ConfigError(
            "comm.tune=true and HOROVOD_FUSION_THRESHOLD exclude each other; unset it: buckets take its place"
        )
    cycle_ms = float(os.environ.get(CYCLE, CommSettings.cycle_ms))
    return CommSettings(cycle_ms, float(config.strategy.get("bucket_mib", CommSettings.bucket_mib)))


def tune(run: Run, build: Callable[[], keras.Model]) -> None:
    """Restarts the exchange between the ranks with the fastest settings (every rank).

    build makes a compiled model whose optimizer reduces by the strategy's settings of that moment.
    """
    strategy, folder, default = run.strategy, run.folder, settings_of(run.config)
    ranks = strategy.comm.gather(strategy.topology.host)
    found = strategy.comm.on_chief(lambda: _read(folder, ranks))
    if found is None:
        began = time.monotonic()
        found, default, seconds = _search(strategy, build, run.batches_from(0), default)
        gain = seconds[default] / seconds[found]
        outcome = f"comm.tune: {in_words(found)}, {gain:.2f} times as fast as {in_words(default)}"
        log.info("%s (%d tried in %.0f s)\n", outcome, len(seconds), time.monotonic() - began)
        strategy.comm.on_chief(lambda: _write(folder, ranks, found, seconds))
    else:
        log.info("comm.tune: %s, from %s\n", in_words(found), folder / FILE)
    strategy.restart(found.environment, found.bucket_mib)


def _search(
    strategy: Strategy, build: Callable[[], keras.Model], batches: tf.data.Dataset, default: CommSettings
) -> tuple[CommSettings, CommSettings, dict[CommSettings, float]]:
    """The fastest, the default, and the seconds of a step of all that were tried (the same on every rank)."""
    seconds = dict[CommSettings, float]()
    mib = sum(v.value.shape.num_elements() * v.value.dtype.size for v in build().trainable_variables) / (1 << 20)
    # Larger ones would hold all gradients, and so be one, as 0 says.
    buckets = [0.0, *(size for size in BUCKETS_MIB if size < mib)]
    best = default = replace(default, bucket_mib=default.bucket_mib if default.bucket_mib < mib else 0.0)
    # One setting after the other; each goes on from the best of those before it.
    for name, values in {"bucket_mib": buckets, "cycle_ms": CYCLES_MS}.items():
        tried = list(dict.fromkeys([best, *(replace(best, **{name: value}) for value in values)]))
        rounds: dict[CommSettings, list[float]] = {comm: [] for comm in tried}
        trials = dict(_trials(tried, strategy, build, batches))
        for number in range(ROUNDS):
            for comm in tried if number % 2 == 0 else reversed(tried):
                strategy.restart(comm.environment, comm.bucket_mib)
                rounds[comm].append(max(strategy.comm.gather(trials[comm]())))
        seconds |= {comm: median(found) for comm, found in rounds.items()}
        fastest = min(tried, key=lambda comm: seconds[comm])
        best = fastest if seconds[fastest] < WORTHWHILE * seconds[best] else best
    return best, default, seconds


def _trials(
    tried: list[CommSettings], strategy: Strategy, build: Callable[[], keras.Model], batches: tf.data.Dataset
) -> Iterator[tuple[CommSettings, Callable[[], float]]]:
    """For each, what takes some steps and returns a step's seconds; those with the same buckets share a model."""
    made: dict[float, Callable[[], float]] = {}
    for comm in tried:
        if comm.bucket_mib not in made:
            strategy.restart(comm.environment, comm.bucket_mib)
            made[comm.bucket_mib] = _trial(build(), strategy, batches)
        yield comm, made[comm.bucket_mib]


def _trial(model: keras.Model, strategy: Strategy, batches: tf.data.Dataset) -> Callable[[], float]:
    iterator = iter(batches.take(1).cache().repeat())
    steps = make_steps(model, iterator, strategy.marks)
    steps(1)  # Slower than the others.
    began = time.perf_counter()
    steps(1)
    once = max(strategy.comm.gather(time.perf_counter() - began))
    number = max(1, min(STEPS, int(SECONDS_FOR_STEPS / ROUNDS / once)))

    def run() -> float:
        steps(1)  # The first one after a start fills Horovod's cache.
        began = time.perf_counter()
        steps(number)
        return (time.perf_counter() - began) / number

    return run


def in_words(comm: CommSettings) -> str:
    """Short.

    >>> in_words(CommSettings()), in_words(CommSettings(0.2, 0.0))
    ('cycle 1 ms, buckets of 25 MiB', 'cycle 0.2 ms, one bucket')
    """
    buckets = f"buckets of {comm.bucket_mib:g} MiB" if comm.bucket_mib else "one bucket"
    return f"cycle {comm.cycle_ms:g} ms, {buckets}"


def _read(folder: Path, ranks: list[str]) -> CommSettings | None:
    """What was found before for these ranks; a file that says nothing is written anew (chief only)."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if kept["hosts"] == ranks:
            return CommSettings(**kept["comm"])
    return None


def _write(folder: Path, ranks: list[str], found: CommSettings, seconds: dict[CommSettings, float]) -> None:
    tried = [{**asdict(comm), "step_seconds": round(value, 7)} for comm, value in seconds.items()]
    content = {"comm": asdict(found), "hosts": ranks, "tried": tried}
    write_atomic(folder / FILE, json.dumps(content, indent=1) + "\n")
