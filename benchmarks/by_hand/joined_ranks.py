"""One rank of a job that has joined Horovod and reduces nothing: what a step is while Horovod's thread runs beside it.

On CPU that thread wakes each cycle, talks with the other ranks', and takes its time from the cores
that compute. benchmarks.plan_here starts it with the settings of a workload; plain Keras fit does
the rest.
"""

from __future__ import annotations

import hvtrain.keras as hvd
from benchmarks.by_hand.common import make_setup
from hvtrain.system import resources


def main() -> None:
    """Trains alone beside the others, and reports."""
    hvd.init()
    # On the cores that the runner would give this rank.
    resources.pin_to_cores(hvd.rank(), hvd.size())
    setup = make_setup(hvd.rank(), hvd.size())
    setup.fit(setup.model(), setup.optimizer(), hvd.rank())


if __name__ == "__main__":
    main()
