"""Plain Keras: compile and fit on one process, no Horovod anywhere."""

from benchmarks.by_hand.common import make_setup, pinned_job


def main() -> None:
    """Trains, and reports."""
    job = pinned_job()
    setup = make_setup()
    setup.fit(setup.model(), setup.optimizer(), job)


if __name__ == "__main__":
    main()
