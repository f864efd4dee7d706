"""hvtrain: Keras 3 training with Horovod. `python -m hvtrain` runs it, `hvtrain.keras` is the library."""

__version__ = "0.1.0"
