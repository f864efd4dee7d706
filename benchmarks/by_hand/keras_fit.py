"""Keras's own fit with a minimal optimizer that averages gradients over all ranks."""

from typing import Any

import horovod.tensorflow as hvd
import keras

from benchmarks.by_hand.common import make_setup, pin


def reducing(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Makes the optimizer average gradients over all ranks before each step."""

    # The least that a user has to write.
    class Reducing(type(optimizer)):  # type: ignore[misc]
        def apply(self, gradients: list[Any], variables: Any = None) -> None:
            super().apply(hvd.grouped_allreduce(list(gradients), name="gradients"), variables)

    optimizer.__class__ = Reducing
    return optimizer


def main() -> None:
    """Trains, and reports."""
    hvd.init()
    pin(hvd.local_rank(), hvd.local_size())
    setup = make_setup(hvd.rank(), hvd.size())
    model = setup.model()
    optimizer = reducing(setup.optimizer())
    # Before the broadcast, which covers the slots too.
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(
        [v.value for v in (*model.variables, *optimizer.variables)], root_rank=0
    )
    setup.fit(model, optimizer, hvd.rank())


if __name__ == "__main__":
    main()
