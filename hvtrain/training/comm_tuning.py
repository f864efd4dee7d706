"""comm.tune=true: finds the reduction settings with which this model trains fastest on these ranks.

Horovod's own autotuner tries neither cycles below 1 ms nor buckets, and it tunes during training.
This module times steps of a copy of the model before training, and stores the result in the run
folder for later starts with the same hosts, kinds of devices and sizes of gradients. It leaves
Horovod's fusion buffer alone: buckets determine the size of messages, and Horovod 0.28.1 crashes when
it is restarted with both a fusion threshold and a cycle time.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvtrain.config.schema import round_up_to_accumulation
from hvtrain.errors import ConfigError
from hvtrain.keras.process import CYCLE_TIME
from hvtrain.models.memory import num_bytes
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.loop import make_steps
from hvtrain.system.files import read_json, write_json
from hvtrain.training.run import Run

log = logging.getLogger(__name__)

FILE = "comm.json"
MIB = 1 << 20
CYCLES_MS = (1.0, 0.5, 0.2, 0.1, 0.05)
BUCKETS_MIB = (25.0, 4.0)
# The time of a setting is the median of ROUNDS rounds of up to STEPS steps. If steps are
# long, a round has fewer, so that all rounds take SECONDS_FOR_STEPS if possible.
ROUNDS = 3
STEPS = 10
SECONDS_FOR_STEPS = 3.0
# A setting is chosen only if its time is below this share of the best time
# so far; a smaller gain may be noise.
WORTHWHILE = 0.97


class CommSettings(NamedTuple):
    """Settings of the reduction.

    Args:
        cycle_ms: Interval at which Horovod looks for ready gradients, in milliseconds.
        bucket_mib: Size of buckets in MiB, see HorovodStrategy; 0: one bucket.
    """

    cycle_ms: float
    bucket_mib: float

    def __str__(self) -> str:
        buckets = f"buckets of {self.bucket_mib:g} MiB" if self.bucket_mib else "one bucket"
        return f"cycle {self.cycle_ms:g} ms, {buckets}"


def default_settings(bucket_mib: float) -> CommSettings:
    """Returns the settings that apply without comm.tune.

    Raises:
        ConfigError: HOROVOD_FUSION_THRESHOLD is set, or HOROVOD_CYCLE_TIME is not a number.
    """
    threshold = os.environ.get("HOROVOD_FUSION_THRESHOLD")
    if threshold is not None:
        raise ConfigError(
            f"comm.tune=true and HOROVOD_FUSION_THRESHOLD={threshold} exclude each other; unset the variable, "
            "since buckets take its place"
        )
    cycle_time = os.environ.get(CYCLE_TIME, "1")  # Horovod's default is 1 ms.
    try:
        return CommSettings(float(cycle_time), float(bucket_mib))
    except ValueError as error:
        raise ConfigError(
            f"{CYCLE_TIME}={cycle_time} is not a number; set it to milliseconds, or unset it"
        ) from error


def tune(run: Run, build: Callable[[], keras.Model]) -> None:
    """Finds the fastest settings or reads an earlier result, and restarts communication with them (every rank).

    Args:
        run: The run, in whose folder the result is kept.
        build: Makes a compiled model whose optimizer uses the strategy's current settings.

    Raises:
        ConfigError: HOROVOD_FUSION_THRESHOLD is set, or HOROVOD_CYCLE_TIME is not a number.
    """
    strategy = run.strategy
    folder = run.folder
    comm = strategy.comm
    default = default_settings(run.config.strategy.get("bucket_mib", 25.0))
    sizes = [num_bytes([variable]) for variable in build().trainable_variables]

    hosts, devices = zip(*comm.gather((comm.topology.host, _device_kind())))
    measured_for = {"hosts": list(hosts), "devices": list(devices), "gradient_bytes": sizes}
    best = comm.on_chief(lambda: _read(folder, measured_for))
    if best is not None:
        log.info("comm.tune: %s, from %s\n", best, folder / FILE)
        strategy.restart(*best)
        return

    began = time.monotonic()
    gradient_mib = sum(sizes) / MIB
    if default.bucket_mib >= gradient_mib:
        # All gradients fit into one bucket, and 0 is the setting for that.
        default = default._replace(bucket_mib=0.0)
    # The plan's first step: plan.shift is not 0 if the run began with another plan.
    batches = run.batches_from(run.plan.shift)
    best, seconds = _search(strategy, batches, build, default, gradient_mib)

    gain = "the default"
    if best != default:
        gain = f"{seconds[default] / seconds[best]:.2f}x as fast as {default}"
    log.info(
        "comm.tune: %s, %s (%d tried in %.0f s)\n",
        best,
        gain,
        len(seconds),
        time.monotonic() - began,
    )
    tried = [
        {**settings._asdict(), "step_seconds": round(value, 7)}
        for settings, value in seconds.items()
    ]
    content = {"comm": best._asdict(), **measured_for, "tried": tried}
    comm.on_chief(lambda: write_json(folder / FILE, content))
    strategy.restart(*best)


def _search(
    strategy: Strategy,
    batches: tf.data.Dataset,
    build: Callable[[], keras.Model],
    default: CommSettings,
    gradient_mib: float,
) -> tuple[CommSettings, dict[CommSettings, float]]:
    """Returns the fastest settings, and the seconds per step of all settings tried.

    Each time is that of the slowest rank, so all ranks make the same choice.
    """
    seconds: dict[CommSettings, float] = {}

    buckets = [0.0, *(size for size in BUCKETS_MIB if size < gradient_mib)]
    best = default
    # One setting at a time, starting from the best so far: half as many trials as a full grid.
    for name, values in {"bucket_mib": buckets, "cycle_ms": CYCLES_MS}.items():
        others = [best._replace(**{name: value}) for value in values]
        candidates = list(dict.fromkeys([best, *others]))
        # Settings with the same buckets share a model.
        trials: dict[float, Callable[[], float]] = {}
        for settings in candidates:
            if settings.bucket_mib not in trials:
                strategy.restart(*settings)
                trials[settings.bucket_mib] = _trial(build(), strategy, batches)

        rounds: dict[CommSettings, list[float]] = {settings: [] for settings in candidates}
        order = candidates
        for _ in range(ROUNDS):
            for settings in order:
                strategy.restart(*settings)
                rounds[settings].append(max(strategy.comm.gather(trials[settings.bucket_mib]())))
            # The order alternates, so that no setting suffers most if the machine slows down.
            order = order[::-1]

        seconds |= {settings: median(times) for settings, times in rounds.items()}
        fastest = min(candidates, key=seconds.__getitem__)
        if seconds[fastest] < WORTHWHILE * seconds[best]:
            best = fastest
    return best, seconds


def _trial(model: keras.Model, strategy: Strategy, batches: tf.data.Dataset) -> Callable[[], float]:
    """Returns a function that runs some steps and returns the seconds per step (every rank)."""
    # PowerSGD would send whole gradients in the steps of a trial, and not in most of a run.
    memory = model.optimizer.rank_variables
    if "same/steps" in memory:
        memory["same/steps"].assign(10**9)
    # The same cached batch in every step, so that the input pipeline takes no time.
    iterator = iter(batches.take(1).cache().repeat())
    steps = make_steps(model, iterator, strategy.marks)
    # With gradient accumulation only every N-th step reduces. Timing whole groups of N
    # makes all trials reduce equally often.
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    accumulate = optimizer.gradient_accumulation_steps or 1

    def step_seconds(num_steps):
        steps(accumulate)  # The first update after a restart is slower: it fills Horovod's cache.
        began = time.perf_counter()
        steps(num_steps)
        return (time.perf_counter() - began) / num_steps

    slowest = max(strategy.comm.gather(step_seconds(accumulate)))
    num_steps = max(1, min(STEPS, int(SECONDS_FOR_STEPS / ROUNDS / slowest)))
    return lambda: step_seconds(round_up_to_accumulation(num_steps, accumulate))


def _device_kind() -> str:
    """Returns the kind of device on which this rank computes: the GPU's model, or CPU."""
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return "CPU"
    return tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")


def _read(folder: Path, measured_for: dict[str, list[Any]]) -> CommSettings | None:
    """Reads the earlier result for the same hosts, devices and gradients (chief only).

    Returns None if there is no such result, or the file is damaged.
    """
    earlier = read_json(folder / FILE, dict)
    with suppress(TypeError, KeyError):
        if all(earlier[name] == value for name, value in measured_for.items()):
            return CommSettings(**earlier["comm"])
    return None
