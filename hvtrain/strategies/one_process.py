"""Refuses a launcher's other processes, for strategies that are one process."""

from hvtrain.errors import ConfigError


def refuse_several(strategy: str, instead: str) -> None:
    """Raises ConfigError if a launcher started several processes, each of which would train alone."""
    from hvtrain.keras.process import launched_size  # It imports Horovod, which hvtrain.plan works without.

    if (size := launched_size() or 1) > 1:
        raise ConfigError(
            f"strategy={strategy} is one process, and the launcher started {size}; start it with python -m hvtrain, or "
            f"choose strategy={instead}"
        )
