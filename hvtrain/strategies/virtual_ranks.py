"""A strategy whose results are bit-identical on any number of ranks.

Each step is divided into a fixed number of parts, and it does not matter which rank computes which part.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from hvtrain.checkpoint.model_state import seeds_of
from hvtrain.config.validate import check_whole
from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import Topology
from hvtrain.errors import ConfigError
from hvtrain.keras.hooks import hook_of
from hvtrain.keras.ordered_reduction import OrderedReducer
from hvtrain.keras.over_ranks import synchronized_layers
from hvtrain.keras.sharded_embedding import sharded_layers
from hvtrain.step.joint_loss import joint_loss, refuse_joint_batch
from hvtrain.strategies.horovod import HorovodStrategy
from hvtrain.strategies.loop import replaced, split_batch

# Distance between the seeds of two parts: 2**32 divided by the golden ratio, as in Knuth's multiplicative hashing.
SEED_STRIDE = 0x9E3779B9
# Limit on a layer's random draws in one step; beyond it, the draws of two steps would overlap. Seeds
# repeat after 2**32 / MAX_DRAWS steps, about a million.
MAX_DRAWS = 1 << 12


class VirtualRanksStrategy(HorovodStrategy):
    """Horovod with results that do not depend on the number of ranks, down to the last bit.

    A step has one part for each virtual rank: a batch of train.batch_size examples, with its own seeds.
    Each rank computes its parts one after the other. Gradients, and changes of moving statistics, are
    added in the order of the parts. So a run can continue from any step on another number of ranks.

    Args:
        virtual_ranks: number of virtual ranks, a multiple of the number of ranks.
        share_gpus, pin_cores: as in HorovodStrategy.
    """

    name = "virtual_ranks"
    unit = "virtual ranks"
    cuts_batches = True
    takes_short_batches = False
    can_restart = False

    @property
    def num_computing(self) -> int:
        """Number of ranks, since a rank computes its parts one after the other."""
        return self.topology.size

    def __init__(
        self, virtual_ranks: int, share_gpus: bool = False, pin_cores: bool = True
    ) -> None:
        super().__init__(share_gpus=share_gpus, pin_cores=pin_cores)
        check_whole("strategy.virtual_ranks", virtual_ranks, 1)
        self.virtual_ranks = virtual_ranks

    def start(self) -> Topology:
        topology = super().start()
        if self.virtual_ranks % topology.size:
            raise ConfigError(
                f"strategy.virtual_ranks={self.virtual_ranks} is not a multiple of the {topology.size} ranks, "
                "which compute equal numbers of parts; choose a multiple, such as 12 for 1, 2, 3, 4 or 6 ranks"
            )
        self.num_replicas = self.virtual_ranks // topology.size
        return topology

    def before_devices(self) -> None:
        # TensorFlow divides matrix products among threads, so the last bits depend on their number.
        tf.config.threading.set_intra_op_parallelism_threads(1)

    def distribute(self, optimizer: Optimizer, check_finite: bool) -> Optimizer:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        self.exclude({"train.accumulate": inner.gradient_accumulation_steps})
        distributed = super().distribute(optimizer, check_finite)
        hook: Any = hook_of(distributed)
        hook.reducer = OrderedReducer(marks=self.marks)
        return distributed

    def distribute_loss(self, loss: keras.losses.Loss) -> keras.losses.Loss:
        def refuse(_):
            raise ConfigError(
                f"strategy={self.name} computes the parts of a step one by one, but the loss needs a sum over all "
                "parts (because of a mask, an ignored label or weights); choose strategy=horovod"
            )

        refuse_joint_batch(loss, self.name)
        return joint_loss(loss, refuse, lambda: self.virtual_ranks)

    def prepare(self, model: keras.Model) -> None:
        self.exclude(
            {
                "train.jit_compile": model.jit_compile,
                "model.shard_embeddings": sharded_layers(model),
                # Its statistics would depend on how the parts are spread over the ranks.
                "train.sync_batch_norm": synchronized_layers(model),
            }
        )

    def check_plan(self, plan: StepPlan) -> None:
        super().check_plan(plan)
        if len({share.batch_size for share in plan.shares}) > 1:
            raise ConfigError(
                f"strategy={self.name} needs parts of one size; give one number as train.batch_size"
            )

    def train_step(self, model: keras.Model) -> Callable[[Any], Any]:
        optimizer = model.optimizer
        reducer: Any = hook_of(optimizer).reducer  # type: ignore[union-attr]
        seeds = seeds_of(model)
        statistics = [
            variable
            for variable in model.non_trainable_weights
            if tf.as_dtype(variable.dtype).is_floating
        ]
        # Ranks begin with different seeds; all take rank 0's.
        for seed, value in zip(seeds, self.comm.broadcast([seed.numpy() for seed in seeds])):
            seed.assign(value)
        first_part = self.topology.rank * self.num_replicas

        def train_on_part(part_number, part):
            """Returns the result of the model's step on this part, and its gradients."""
            gradients: list[Any] = []
            # The part's random numbers depend on its number and on the step alone.
            draws = tf.cast(optimizer.iterations, tf.int64) * MAX_DRAWS
            for seed in seeds:
                offset = tf.stack([tf.constant(part_number * SEED_STRIDE, tf.int64), draws])
                seed.assign(seed + tf.cast(offset % 2**32, tf.uint32))
            with replaced(optimizer, "apply", lambda values, _=None: gradients.extend(values)):
                return model.train_step(part), gradients

        @tf.autograph.experimental.do_not_convert
        def step(batch):
            restored = [*statistics, *seeds]
            values_before = [tf.identity(variable) for variable in restored]
            reducer.parts = []
            parts = split_batch(batch, self.num_replicas)
            for part_number, part in enumerate(parts, first_part + 1):
                result, gradients = train_on_part(part_number, part)
                # All parts begin with the same statistics, to which the mean change is added below.
                changes = [variable - before for variable, before in zip(statistics, values_before)]
                reducer.parts.append([*gradients, *changes])
                for variable, before in zip(restored, values_before):
                    variable.assign(before)

            optimizer.apply(_sums(reducer.parts, len(gradients)), model.trainable_variables)
            for variable, before, change in zip(statistics, values_before, reducer.others):
                variable.assign(before + change)
            return result

        return step

    def description(self) -> str:
        return f"{super().description()}, {self.virtual_ranks} virtual ranks"


def _sums(parts: list[list[Any]], num_gradients: int) -> list[Any]:
    """Returns the sums of this rank's gradients over its parts, to pass to the optimizer.

    OrderedReducer replaces the sums with the means over all parts. The sums only show whether all
    gradients are finite.
    """
    return [
        None if values[0] is None else tf.add_n([tf.convert_to_tensor(value) for value in values])
        for values in zip(*(part[:num_gradients] for part in parts))
    ]
