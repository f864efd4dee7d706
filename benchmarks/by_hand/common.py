"""The runner's model, optimizer and batches, for all hand-written contenders: they differ only in the loop."""

import os
from dataclasses import dataclass

import keras
import tensorflow as tf

from benchmarks.clock import Clock
from benchmarks.measure import JOB
from hvtrain.config.compose import compose
from hvtrain.config.instantiate import build
from hvtrain.config.make_plan import make_plan
from hvtrain.config.schema import RunConfig, from_dict
from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import Topology
from hvtrain.data.source import Source
from hvtrain.system import resources
from hvtrain.tasks import Task
from hvtrain.training.augment import open_augmentation
from hvtrain.training.run import training_batches


@dataclass(frozen=True)
class Setup:
    """The parts of a training on one rank."""

    config: RunConfig
    source: Source
    plan: StepPlan
    topology: Topology

    def batches_from(self, step: int) -> tf.data.Dataset:
        """An endless stream of (images, labels) from a step on."""
        return training_batches(self.source, self.plan, self.topology, self.config.seed, step)

    def model(self) -> keras.Model:
        facts = {**self.source.facts(), "num_outputs": self.source.num_classes}
        return build(self.config, "model", keras.Model, facts, self.source.name)

    def optimizer(self) -> keras.optimizers.Optimizer:
        rate = self.plan.peak_learning_rate
        return build(self.config, "optimizer", keras.optimizers.Optimizer, learning_rate=rate)

    @staticmethod
    def loss() -> keras.losses.Loss:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @staticmethod
    def accuracy() -> keras.metrics.Metric:
        return keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    def fit(self, model: keras.Model, optimizer: keras.optimizers.Optimizer, rank: int) -> None:
        """Trains with Keras's fit for plan.num_steps. The callback Clock writes the report of this rank or job."""
        # Without XLA, as the runner trains by default.
        model.compile(
            optimizer=optimizer, loss=self.loss(), metrics=[self.accuracy()], jit_compile=False
        )
        clock = Clock(self.plan.num_steps, rank)

        def train(first_epoch: int, last_epoch: int, steps: int) -> None:
            if last_epoch > first_epoch and steps:
                model.fit(
                    self.batches_from(first_epoch * self.plan.steps_per_epoch),
                    initial_epoch=first_epoch,
                    epochs=last_epoch,
                    steps_per_epoch=steps,
                    callbacks=[clock],
                    verbose=2,
                )

        # Whole epochs, then the remaining steps.
        whole_epochs, remaining_steps = divmod(self.plan.num_steps, self.plan.steps_per_epoch)
        train(0, whole_epochs, self.plan.steps_per_epoch)
        train(whole_epochs, whole_epochs + 1, remaining_steps)


def pin(number: int, size: int) -> None:
    """Pins this process, one of `size` on the host, as the runner pins a rank: to a GPU of its own, or else to cores.

    Call it before TensorFlow initializes a device.
    """
    if not use_gpu(number):
        resources.pin_to_cores(number, size)


def use_gpu(number: int | None) -> bool:
    """Hides all GPUs but one, whose memory is taken as needed. Returns False if there are none.

    number: of the GPU; None hides all.
    """
    # As the runner finds them: TensorFlow by itself may leave all GPUs out, and the contender would run on CPUs.
    gpus = resources.physical_gpus()
    # More processes than GPUs share them.
    visible = [gpus[number % len(gpus)]] if gpus and number is not None else []
    tf.config.set_visible_devices(visible, "GPU")
    for gpu in visible:
        tf.config.experimental.set_memory_growth(gpu, True)

    return bool(gpus)


def pinned_job() -> int:
    """Pins this job and returns its number among the jobs, from 0."""
    number, num_jobs = map(int, os.environ[JOB].split(" of "))
    pin(number, num_jobs)
    return number


def make_setup(rank: int = 0, size: int = 1, overrides: list[str] | None = None) -> Setup:
    """Sets up a training for one rank of `size` on one host. Sets the seeds.

    overrides: its settings; default: those of the command line.
    """
    config = from_dict(compose(overrides))
    keras.utils.set_random_seed(config.seed + rank)
    source = build(config, "dataset", Source)
    if config.augment:
        task = build(config, "task", Task)
        task.prepare(source)
        open_augmentation(config, source, task)
    rate = config.optimizer["learning_rate"]
    plan = make_plan(config.train, rate, source.shard_sizes("train", size), source.name)
    # All ranks are on one host, so the local rank is the rank.
    return Setup(config, source, plan, Topology(rank, size, rank, size))
