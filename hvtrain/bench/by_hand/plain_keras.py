"""Plain Keras: compile and fit on one process, no Horovod anywhere."""

from hvtrain.bench.by_hand.common import pinned_job, work


def main() -> None:
    """Trains, and reports."""
    job, todo = pinned_job(), work()
    todo.fit(todo.model(), todo.optimizer(), job)


if __name__ == "__main__":
    main()
