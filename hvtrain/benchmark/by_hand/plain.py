"""Plain Keras: compile and fit on one process, no Horovod anywhere."""

from __future__ import annotations

import os

from hvtrain.benchmark.by_hand.work import work


def main() -> None:
    """Trains, and reports."""
    todo = work()
    todo.fit(todo.model(), todo.optimizer(), int(os.environ.get("HVTRAIN_BENCH_JOB", "0")))


if __name__ == "__main__":
    main()
