"""How far this process's training steps came, counted inside the graph, for a thread that watches from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvtrain.keras.in_graph import count_after, new_counter
from hvtrain.keras.optimizer import num_reductions, reducer_of


class StepMarks:
    """Of the steps of one model and its DistributedOptimizer."""

    def __init__(self) -> None:
        self._arrived = new_counter()
        self._ready: tf.Variable | None = None
        self._optimizer: Any = None

    def follow(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Counts this optimizer's gradients, in what is traced from now on."""
        reducer = reducer_of(optimizer)
        if reducer is not None:
            self._ready, self._optimizer = reducer.count_ready(), optimizer

    @contextmanager
    def counting_batches(self, model: keras.Model) -> Iterator[None]:
        """While it lasts, the train function that Keras makes of the model counts the batches that reach it."""
        step = model.train_step

        def counted(data: Any) -> Any:
            count_after(data, self._arrived)
            return step(data)

        model.train_step = counted
        try:
            yield
        finally:
            del model.train_step

    def __call__(self) -> tuple[int, int, int]:
        """Batches that arrived in a step; gradients that were ready to be reduced; gradients that were reduced."""
        ready = 0 if self._ready is None else int(self._ready.numpy())
        return int(self._arrived.numpy()), ready, num_reductions(self._optimizer)
