"""The contenders: what each is."""

from dataclasses import replace

from hvtrain.errors import ConfigError
from hvtrain.plan.measurement import RUNNER, RUNNER_ALONE, Contender
from hvtrain.plan.processes import HOROVOD

BY_HAND = "benchmarks.by_hand"


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
    RUNNER_ALONE,
    Contender("keras", "plain Keras fit on one process", f"{BY_HAND}.plain_keras", "alone"),
)
CONTENDERS = {contender.name: contender for contender in _ALL}
TRAIN = [contender.name for contender in _ALL if contender.module != f"{BY_HAND}.batches"]


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
