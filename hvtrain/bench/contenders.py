"""The contenders: what each is, and one measured run of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from hvtrain.bench import contender_report
from hvtrain.bench.processes import HOROVOD, launch_and_report
from hvtrain.config.words import word
from hvtrain.errors import ConfigError

RUNNER = "hvtrain"
BY_HAND = "hvtrain.bench.by_hand"
CLOCK = "hvtrain.bench.clock.Clock"


@dataclass(frozen=True)
class Contender:
    """One way to train.

    module is what `python -m` runs, and way how: one of HOROVOD, alone, independent, workers, or servers. variables,
    words and data are settings of its own, on top of the session's. on_terminal: its output goes to a terminal.
    """

    name: str
    about: str
    module: str
    way: str
    variables: tuple[tuple[str, str], ...] = ()
    words: tuple[str, ...] = ()
    data: str | None = None
    on_terminal: bool = False

    @property
    def is_one_job(self) -> bool:
        """Whether its processes take each step together."""
        return self.way in (*HOROVOD, "workers")

    @property
    def trains(self) -> bool:
        return self.module != f"{BY_HAND}.batches"

    @property
    def is_one_rank(self) -> bool:
        """Whether each process trains a model of its own, unaware of the others."""
        return self.way in ("alone", "independent")


MPI, GLOO = HOROVOD
_ALL = (
    Contender("hvtrain-mpi", "the runner, over MPI", RUNNER, MPI),
    Contender("hvtrain-gloo", "the runner, over Gloo", RUNNER, GLOO),
    Contender("loop-mpi", "a hand-written Horovod loop, over MPI", f"{BY_HAND}.tape_loop", MPI),
    Contender("loop-gloo", "a hand-written Horovod loop, over Gloo", f"{BY_HAND}.tape_loop", GLOO),
    Contender("fit-mpi", "Keras fit with a minimal reducing optimizer, over MPI", f"{BY_HAND}.keras_fit", MPI),
    Contender("multi-worker", "MultiWorkerMirroredStrategy, a loop", f"{BY_HAND}.multi_worker", "workers"),
    Contender("parameter-server", "ParameterServerStrategy, asynchronous", f"{BY_HAND}.parameter_server", "servers"),
    Contender("independent", "one-rank jobs that never talk: the ceiling", f"{BY_HAND}.plain_keras", "independent"),
    Contender("batches", "no model: the data alone, in as many processes", f"{BY_HAND}.batches", "independent"),
    Contender("hvtrain-1", "the runner on one rank", RUNNER, "alone"),
    Contender("keras", "plain Keras fit on one process", f"{BY_HAND}.plain_keras", "alone"),
)
CONTENDERS = {contender.name: contender for contender in _ALL}


def named(words: str) -> Contender:
    """The contender NAME, or NAME@SETTING=VALUE@...: variables in capitals, settings of the runner, data=..., or
    output=terminal, on which the runner shows its live display.

    Raises ConfigError if no contender has that name, or a setting has no value.

    >>> named("hvtrain-mpi@HOROVOD_CYCLE_TIME=0.2@guard.every=0@data=synthetic")  # doctest: +ELLIPSIS
    Contender(..., variables=(('HOROVOD_CYCLE_TIME', '0.2'),), words=('guard.every=0',), data='synthetic', ...)
    """
    name, *settings = words.split("@")
    if name not in CONTENDERS:
        raise ConfigError(f"--contenders {name} is not one of {', '.join(CONTENDERS)}")
    variables, more, data, on_terminal = [], [], None, False
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--contenders {words}: {setting} has no value; write {name}@{setting}=VALUE")
        if key.partition("_")[0].isupper():  # OMPI_MCA_btl is one too.
            variables.append((key, value))
        elif key == "data":
            data = value
        elif setting == "output=terminal":
            on_terminal = True
        else:
            more.append(setting)
    own = replace(CONTENDERS[name], name=words, variables=tuple(variables), words=tuple(more))
    return replace(own, data=data, on_terminal=on_terminal)


@dataclass(frozen=True)
class Measured:
    """One run of a contender.

    step_seconds is the time of a joint step and examples_per_second the rate of all processes; first_step_seconds is
    the slowest process's and peak_bytes the largest's.
    """

    step_seconds: float
    examples_per_second: float
    first_step_seconds: float
    peak_bytes: int
    loss: float


def measure(
    contender: Contender,
    words: Sequence[str],
    num_ranks: int,
    batch_size: int,
    steps: tuple[int, int],
    folder: Path,
    threads: int,
) -> Measured:
    """Runs the contender once: so many warm-up steps, and so many timed ones. The folder keeps its output.

    Raises LostRankError, which names the file with its output, if it fails.
    """
    size = 1 if contender.way == "alone" else num_ranks
    more = list(contender.words)
    if contender.module == RUNNER:
        more += [f"+callbacks.bench._target_={CLOCK}", f"+callbacks.bench.num_steps={sum(steps)}"]
        more.append(word("run.dir", f"{folder}/run"))
    variables = {contender_report.WARMUP: str(steps[0]), **dict(contender.variables)}
    what = contender.way, contender.module, [*words, *more]
    reports = launch_and_report(*what, size, folder, threads, variables, contender.on_terminal)
    examples_per_second = sum(batch_size / found["step_seconds"] for found in reports)
    return Measured(
        step_seconds=batch_size * size / examples_per_second,
        examples_per_second=examples_per_second,
        first_step_seconds=max(found["first_step_seconds"] for found in reports),
        peak_bytes=max(found["peak_bytes"] for found in reports),
        loss=mean(found["loss"] for found in reports),
    )
