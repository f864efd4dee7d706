"""What is compared: contenders, each a way to train, and the workloads that all of them train. Pure."""

from dataclasses import dataclass, replace

from hvtrain.errors import ConfigError

RUNNER = "hvtrain"
BY_HAND = "benchmarks.by_hand"
# Ways to start the processes of a contender: by Horovod's launcher, or beside each other.
MPI = "horovodrun-mpi"
GLOO = "horovodrun-gloo"


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        name: As in --contenders.
        about: A line for --help.
        module: What `python -m` runs.
        way: How its processes start: MPI, GLOO, alone, independent, workers, or servers.
        variables: Environment variables of its own.
        overrides: Settings of its own, on top of the session's.
        data: A data set of its own in place of the session's.
        on_terminal: Its output goes to a terminal.
    """

    name: str
    about: str
    module: str
    way: str
    variables: tuple[tuple[str, str], ...] = ()
    overrides: tuple[str, ...] = ()
    data: str | None = None
    on_terminal: bool = False

    @property
    def is_one_job(self) -> bool:
        """True if its processes take each step together."""
        return self.way in (MPI, GLOO, "workers")

    @property
    def is_one_rank(self) -> bool:
        """True if each process trains a model of its own, unaware of the others."""
        return self.way in ("alone", "independent")


_ALL_CONTENDERS = (
    Contender("hvtrain-mpi", "the runner, over MPI", RUNNER, MPI),
    Contender("hvtrain-gloo", "the runner, over Gloo", RUNNER, GLOO),
    Contender("loop-mpi", "a hand-written Horovod loop, over MPI", f"{BY_HAND}.tape_loop", MPI),
    Contender("loop-gloo", "a hand-written Horovod loop, over Gloo", f"{BY_HAND}.tape_loop", GLOO),
    Contender(
        "fit-mpi",
        "Keras fit with a minimal reducing optimizer, over MPI",
        f"{BY_HAND}.keras_fit",
        MPI,
    ),
    Contender(
        "multi-worker", "MultiWorkerMirroredStrategy, a loop", f"{BY_HAND}.multi_worker", "workers"
    ),
    Contender(
        "parameter-server",
        "ParameterServerStrategy, asynchronous",
        f"{BY_HAND}.parameter_server",
        "servers",
    ),
    Contender(
        "independent",
        "one-rank jobs that never talk: the ceiling",
        f"{BY_HAND}.plain_keras",
        "independent",
    ),
    Contender(
        "batches",
        "no model: the data alone, in as many processes",
        f"{BY_HAND}.batches",
        "independent",
    ),
    Contender("hvtrain-1", "the runner on one rank", RUNNER, "alone"),
    Contender("keras", "plain Keras fit on one process", f"{BY_HAND}.plain_keras", "alone"),
)
CONTENDERS = {contender.name: contender for contender in _ALL_CONTENDERS}
# "batches" trains nothing.
TRAIN = [name for name in CONTENDERS if name != "batches"]


def named(text: str) -> Contender:
    """The contender NAME, or NAME@SETTING=VALUE@... with settings of its own.

    A setting is a variable in capitals, a setting of the runner, data=..., or output=terminal, on
    which the runner shows its live display.

    >>> named("hvtrain-mpi@HOROVOD_CYCLE_TIME=0.2@guard.every=0@data=synthetic")  # doctest: +ELLIPSIS
    Contender(..., variables=(('HOROVOD_CYCLE_TIME', '0.2'),), overrides=('guard.every=0',), data='synthetic', ...)

    Raises:
        ConfigError: No contender has that name, or a setting has no value.
    """
    name, *settings = text.split("@")
    if name not in CONTENDERS:
        raise ConfigError(f"--contenders {name} is not one of {', '.join(CONTENDERS)}")

    contender = replace(CONTENDERS[name], name=text)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(
                f"--contenders {text}: {setting} has no value; write {name}@{setting}=VALUE"
            )
        if key.partition("_")[0].isupper():  # OMPI_MCA_btl is a variable too.
            contender = replace(contender, variables=(*contender.variables, (key, value)))
        elif key == "data":
            contender = replace(contender, data=value)
        elif setting == "output=terminal":
            contender = replace(contender, on_terminal=True)
        else:
            contender = replace(contender, overrides=(*contender.overrides, setting))

    return contender


@dataclass(frozen=True)
class Workload:
    """A training, as settings of the runner.

    Attributes:
        name: As in --workload.
        about: A line for --help.
        model: Settings of the model.
        batch_size: Of one rank.
        warmup_steps: Steps before the timed ones.
        steps: Timed steps.
        image_shape: Of the synthetic data set.
    """

    name: str
    about: str
    model: tuple[str, ...]
    batch_size: int
    warmup_steps: int
    steps: int
    image_shape: str = "[28,28,1]"

    def overrides(
        self, data: str, num_ranks: int, steps: int | None = None, epochs: int = 1
    ) -> list[str]:
        """The settings of the runner; without dropout, so that losses agree.

        Args:
            data: synthetic or fashion_mnist.
            num_ranks: Ranks of the training.
            steps: Timed steps in place of the workload's.
            epochs: Of all steps, the warm-up too, with the synthetic data set.
        """
        total = self.warmup_steps + (steps or self.steps)
        dataset = [f"dataset={data}"]
        if data == "synthetic":
            # So many that the steps take `epochs` epochs.
            num_examples = -(-total // epochs) * self.batch_size * num_ranks
            dataset += [f"dataset.image_shape={self.image_shape}", "dataset.num_classes=10"]
            dataset.append(f"dataset.num_train={num_examples}")

        return [
            *self.model,
            *dataset,
            f"train.batch_size={self.batch_size}",
            f"train.steps={total}",
            "train.validate_every_epochs=null",
            "optimizer=momentum",
            # The rate does not depend on the number of ranks, and is small, so that losses stay
            # close.
            "train.learning_rate_scale=none",
            "optimizer.learning_rate=0.001",
        ]


_WIDE = ("model=mlp", "model.hidden=[4096,4096,1024]")
_ALL_WORKLOADS = (
    Workload("tiny", "MLP 784-64-10: overhead", ("model=mlp", "model.hidden=[64]"), 32, 200, 3000),
    Workload(
        "cnn", "MNIST CNN, 1.2 M parameters", ("model=cnn", "model.dropout=[0,0]"), 64, 10, 100
    ),
    Workload("wide", "MLP of 25 M parameters: communication", _WIDE, 32, 10, 40),
    Workload("separable", "separable CNN, 2.9 M parameters", ("model=separable_cnn",), 16, 5, 30),
    Workload(
        "resnet20", "ResNet-20, 0.27 M parameters", ("model=resnet20",), 32, 5, 40, "[32,32,3]"
    ),
    # On a GPU; a step takes minutes on a few cores.
    Workload(
        "resnet50",
        "ResNet-50 at 224x224, 23.5 M parameters",
        ("model=resnet50",),
        64,
        10,
        60,
        "[224,224,3]",
    ),
)
WORKLOADS = {workload.name: workload for workload in _ALL_WORKLOADS}
