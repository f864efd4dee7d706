"""Runs on each rank: more cases of N ranks against one process than `hvtrain verify` has.

argv[1]: where rank 0 writes JSON; then the names of the cases.
"""

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import fast_keras  # noqa: F401
import keras
from own_steps import Delegates, Normalized, OwnApply, OwnApplyGradients, OwnBackendStep, multi

import hvtrain.keras as hvd
from hvtrain.checks.joint_batch import CASES as LIBRARY
from hvtrain.checks.joint_batch import Case, compare
from hvtrain.keras.hooks import hook_of
from hvtrain.keras.optimizer import divide_losses

STEPS = 20
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


class Unused(keras.layers.Layer):
    """A layer whose weight the loss does not depend on: its gradient is None."""

    def build(self, input_shape):
        self.weight = self.add_weight(shape=(2,), name="unused")

    def call(self, inputs):
        return inputs


CASES = {
    **LIBRARY,
    "clipped": Case(lambda: SGD(0.05, momentum=0.9, global_clipnorm=0.05)),
    "clipnorm": Case(lambda: Adam(0.003, clipnorm=0.01)),
    "ema": Case(lambda: SGD(0.05, use_ema=True, ema_momentum=0.9)),
    "loss_scale_factor": Case(lambda: SGD(0.05, loss_scale_factor=128.0)),
    "schedule": Case(lambda: SGD(keras.optimizers.schedules.CosineDecay(0.1, STEPS))),
    "none_gradient": Case(lambda: SGD(0.05, momentum=0.9), more_layers=lambda: [Unused(name="u")]),
    "embedding_adam": Case(lambda: Adam(0.003), "embedding"),
    "lazy_embedding": Case(lambda: hvd.optimizers.LazyAdam(0.003), "embedding"),
    "adagrad_embedding": Case(lambda: hvd.optimizers.RowwiseAdagrad(0.05), "embedding"),
    "accumulated_embedding": Case(
        lambda: SGD(0.05, gradient_accumulation_steps=2), "embedding", 1e-5, 2
    ),
}


def accumulated(learning_rate):
    return SGD(learning_rate, momentum=0.9, gradient_accumulation_steps=4)


def passes(average):
    """Horovod's way to accumulate, of an optimizer that does not do it by itself."""
    return lambda _: hvd.DistributedOptimizer(
        SGD(0.05, momentum=0.9), backward_passes_per_step=4, average_aggregated_gradients=average
    )


def of_losses(optimizer):
    """Keras's own train_step passes each loss through the optimizer, where it may be divided."""
    distributed = hvd.DistributedOptimizer(optimizer, bucket_bytes=100)
    divide_losses(distributed)
    assert hook_of(distributed).reducer.op == hvd.Sum
    return distributed


# Arguments of DistributedOptimizer that must not change the result, or by no more than rounding.
WRAPPED = {
    "passes_averaged": (Case(lambda: accumulated(0.05), steps_per_reduction=4), passes(True)),
    "passes_summed": (Case(lambda: accumulated(0.2), steps_per_reduction=4), passes(False)),
    "sparse_as_dense": (
        LIBRARY["sparse gradients"],
        partial(hvd.DistributedOptimizer, sparse_as_dense=True),
    ),
    "predivided": (
        LIBRARY["adam"],
        partial(hvd.DistributedOptimizer, gradient_predivide_factor=2.0),
    ),
    "grouped": (LIBRARY["adam"], partial(hvd.DistributedOptimizer, num_groups=2)),
    "buckets": (LIBRARY["adam"], partial(hvd.DistributedOptimizer, bucket_bytes=100)),
    "divided_losses": (LIBRARY["momentum"], of_losses),
    "divided_losses_sparse": (LIBRARY["sparse gradients"], of_losses),
    "divided_losses_accumulated": (
        Case(lambda: accumulated(0.05), steps_per_reduction=4),
        of_losses,
    ),
    "divided_losses_scaled": (CASES["loss_scale_factor"], of_losses),
    "fp16_on_the_wire": (
        Case(LIBRARY["momentum"].optimizer, tolerance=2e-2),
        partial(hvd.DistributedOptimizer, compression=hvd.Compression.fp16),
    ),
    "loss_scale_accumulated": (
        Case(
            lambda: keras.optimizers.LossScaleOptimizer(accumulated(0.05)), "mixed_float16", 1e-2, 4
        ),
        hvd.DistributedOptimizer,
    ),
}
# Classes that do the step by themselves, or change gradients on the way.
OWN = {
    "own_apply": Case(lambda: OwnApply(0.05)),
    "own_apply_gradients": Case(lambda: OwnApplyGradients(0.05)),
    "own_backend_step": Case(lambda: OwnBackendStep(0.05)),
    "normalized": Case(lambda: Normalized(0.05)),
    "delegates": Case(lambda: Delegates(SGD(0.05))),
    "multi": Case(multi),
}
CASES.update(OWN)
ALL = {**{name: (case, hvd.DistributedOptimizer) for name, case in CASES.items()}, **WRAPPED}

hvd.init()
results = {
    name: {
        **asdict(compare(case, STEPS, wrap=wrap)),
        "tolerance": case.tolerance,
        "expected": STEPS // case.steps_per_reduction,
    }
    for name, (case, wrap) in ((name, ALL[name]) for name in sys.argv[2:])
}
if hvd.rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps({"size": hvd.size(), "cases": results}))
hvd.shutdown()
