"""The task of finding a query's item in a catalogue.

Training compares each query with the items in the batch, and evaluation with the whole catalogue.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow import Tensor

from hvtrain.data.source import Source
from hvtrain.errors import ConfigError
from hvtrain.step.joint_loss import is_taking_gradients
from hvtrain.tasks.examples import Columns, Fault, out_of_range
from hvtrain.tasks.task import Losses, Metrics, Task, is_integer

# Keras passes targets to losses as float32, which is exact up to this number.
MAX_ITEMS = 2**24


class InBatchSoftmax(keras.losses.Loss):
    """Cross-entropy of each query's own item among the items in the joint batch of all ranks.

    The same item in another query's pair does not count as a negative. Items are negatives as often as
    they occur, which penalizes popular ones; this is not corrected (Yi et al. 2019,
    doi:10.1145/3298689.3346996, describe a correction). In evaluation the items are the whole
    catalogue, so the loss depends neither on batches nor on the number of ranks.

    Args:
        temperature: The number by which scores are divided.

    Raises:
        ConfigError: The temperature is not above 0.
    """

    joint_batch = staticmethod(lambda rows: rows)
    """Takes a rank's rows, and returns those of all ranks. DistributedLoss sets it."""
    item_vectors: Callable[[], Any]
    """Returns the vectors of the whole catalogue, [items, width]. Retrieval.bind sets it."""

    def __init__(self, temperature: float = 0.1) -> None:
        super().__init__(name="in_batch_softmax")
        if not temperature > 0:
            raise ConfigError(
                f"task.loss.temperature={temperature} is out of range; it must be above 0"
            )
        self.temperature = temperature

    def get_config(self) -> dict[str, Any]:
        return {"temperature": self.temperature}

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Returns losses [batch], given items [batch] and vectors [batch, 2, width]."""
        # Keras has converted the items to floats; see MAX_ITEMS.
        targets = tf.cast(y_true, tf.int32)
        queries = y_pred[:, 0] / self.temperature
        if not is_taking_gradients():
            scores = queries @ tf.transpose(self.item_vectors())
            return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, scores)

        items = self.joint_batch(targets)
        scores = queries @ tf.transpose(self.joint_batch(y_pred[:, 1]))
        own_scores = tf.reduce_sum(queries * y_pred[:, 1], axis=1)
        # The query's own item is in the first column, and is masked in all others.
        other_scores = tf.where(targets[:, None] == items, scores.dtype.min, scores)
        all_scores = tf.concat([own_scores[:, None], other_scores], axis=1)
        return tf.reduce_logsumexp(all_scores, axis=1) - own_scores


class RecallAtK(keras.metrics.SparseTopKCategoricalAccuracy):
    """Share of queries whose item is among the k best in the whole catalogue.

    It depends neither on batches nor on the number of ranks. Each update computes the vectors of all
    items, in training too.

    Args:
        k: Number of best items, as in the Keras metric.
        name: Name of the metric, as in the Keras metric.
    """

    item_vectors: Callable[[], Any]
    """Returns the vectors of the whole catalogue, [items, width]. Retrieval.bind sets it."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        scores = y_pred[:, 0] @ tf.transpose(self.item_vectors())
        super().update_state(y_true, scores, sample_weight)


class Retrieval(Task):
    """Finding a query's item: the model outputs the vectors of query and item, [batch, 2, width].

    Targets are row numbers in the data set's fact `catalogue`, an array [items, ...] with the model's
    input "item" for all items. An item's vector may depend only on the input "item".

    Args:
        loss: Default: InBatchSoftmax.
        metrics: Default: recall at 10.

    Raises:
        ConfigError: In prepare(), if the catalogue has more than MAX_ITEMS items.
    """

    name = "retrieval"
    target = "one whole number, the item's row of the catalogue"
    output = "the vectors of the query and of the item, whose product is the score"
    best = "recall_at_10"

    def default_loss(self) -> Losses:
        return InBatchSoftmax()

    def default_metrics(self) -> Metrics:
        return {"recall_at_10": RecallAtK(10)}

    def output_shape(self, source: Source) -> None:
        return None

    def takes(self, target: Any) -> bool:
        return is_integer(target, rank=0)

    def prepare(self, source: Source) -> None:
        self._catalogue = np.asarray(source.fact("catalogue", f"task={self.name}"))
        if len(self._catalogue) > MAX_ITEMS:
            raise ConfigError(
                f"task=retrieval takes up to {MAX_ITEMS:,} items, and {source.name} has {len(self._catalogue):,}; "
                "give a smaller catalogue"
            )
        super().prepare(source)

    def fault(self, targets: np.ndarray, source: Source) -> Fault:
        return out_of_range(targets, len(self._catalogue))

    def check_parts(self, targets: Any, outputs: Any) -> None:
        """Checks nothing, because the loss and metrics need the catalogue's vectors, which only a model can compute."""

    def check_outputs(self, outputs: Any, name: str, source: Source) -> None:
        shape: Any = getattr(outputs, "shape", ())
        if len(shape) != 3 or shape[1] != 2:
            raise ConfigError(
                f"{name} gives {shape or 'no single tensor'}, and task={self.name} needs (None, 2, width); "
                "use model=two_tower"
            )

    def bind(self, model: keras.Model, parts: Sequence[Any]) -> None:
        query = model.input["query"]
        blank = np.zeros([len(self._catalogue), *query.shape[1:]], query.dtype)
        # Variables rather than constants: TensorFlow would evaluate lookups of constants while
        # optimizing the graph, and lookups in a sharded table are collectives.
        inputs = {"query": tf.Variable(blank), "item": tf.Variable(self._catalogue)}

        def item_vectors():
            rows = {name: tf.convert_to_tensor(part) for name, part in inputs.items()}
            return model(rows, training=False)[:, 1]

        for part in parts:
            part.item_vectors = item_vectors

    def columns(self, outputs: np.ndarray, source: Source) -> Columns:
        """Returns the score of each pair of query and item."""
        return {"score": np.prod(outputs, axis=1).sum(axis=1)}
