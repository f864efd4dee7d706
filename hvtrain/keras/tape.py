"""DistributedGradientTape: gradients reduced over all ranks, for custom training loops."""

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvtrain.keras.gradients import variable_id
from hvtrain.keras.in_graph import counter, positional_name, tf_variable
from hvtrain.keras.optimizer import local_weights
from hvtrain.keras.reduction import Reducer
from hvtrain.keras.table_rows import rows_of


def DistributedGradientTape(  # noqa: N802  (Horovod's name)
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    op: int = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Makes this tape's gradient() reduce over all ranks, and returns the same tape.

    Every rank must call gradient(). Arguments are those of DistributedOptimizer. Sources may be
    Keras or TensorFlow variables. Use it with a plain optimizer, since a DistributedOptimizer would
    reduce the gradients a second time.

    Raises:
        ValueError: for a compression that keeps errors; and in gradient() if a source is a sharded
            table, whose slots and norms need a DistributedOptimizer, with the gradients of a plain
            tf.GradientTape.

    Example:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(value, model.trainable_variables)
    """
    if getattr(compression, "keeps_errors", False):
        raise ValueError(
            f"Compression.{compression.name} keeps errors from step to step, which a tape cannot store; use a "
            "DistributedOptimizer, or Compression.bf16"
        )
    gradtape.__class__ = type("DistributedGradientTape", (_ReductionMixin, type(gradtape)), {})
    gradtape._hvtrain_local = set()
    gradtape._hvtrain_options = {
        "op": op,
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "groups": groups or num_groups or None,
        "predivide_factor": gradient_predivide_factor,
        "device_dense": device_dense,
        "device_sparse": device_sparse,
        "process_set": process_set,
        "scale_local_gradients": scale_local_gradients,
    }
    return gradtape


def PartialDistributedGradientTape(  # noqa: N802  (Horovod's name)
    gradtape: tf.GradientTape,
    *args: Any,
    local_layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None = None,
    **kwargs: Any,
) -> tf.GradientTape:
    """Makes a DistributedGradientTape that keeps the gradients of local_layers on their rank."""
    weights = local_weights(local_layers)
    tape = DistributedGradientTape(gradtape, *args, **kwargs)
    for weight in weights:
        tape.register_local_source(weight)
    return tape


def num_tape_reductions() -> int:
    """Returns the number of reductions that tapes have run on this rank, counted in the graph."""
    return int(counter("tape").numpy())


class _ReductionMixin:
    """Mixin before tf.GradientTape that reduces the gradients it computes."""

    _hvtrain_options: dict[str, Any]
    # Sources whose gradients stay on their rank, by variable_id.
    _hvtrain_local: set[int]

    def register_local_source(self, source: Any) -> None:
        """Keeps the gradient of this source on its rank."""
        self._hvtrain_local.add(variable_id(source))

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any
    ) -> Any:
        # An option of Horovod's tape. It has no effect: messages are never named after variables.
        kwargs.pop("use_generic_names", None)
        variables = tf.nest.flatten(sources)
        tables = [rows for rows in map(rows_of, variables) if rows]
        if tables:
            raise ValueError(
                f"table {tables[0].table} is sharded over the ranks, which a plain optimizer cannot handle; wrap the "
                "optimizer in DistributedOptimizer, and take the gradients with a plain tf.GradientTape"
            )
        tf_variables = [tf_variable(variable) for variable in variables]
        gradients = super().gradient(target, tf_variables, output_gradients, **kwargs)  # type: ignore[misc]

        # A new reducer for each call, named by the call's position in the graph, which is the same
        # on all ranks.
        reducer = Reducer(
            message_name=positional_name("tape"), count=counter("tape"), **self._hvtrain_options
        )
        reducer.local_ids = self._hvtrain_local
        reduced = reducer(gradients, variables)
        for gradient in reduced:
            if gradient is not None:
                # A DistributedOptimizer that does not average refuses to reduce a marked gradient
                # again.
                gradient._hvtrain_reduced = True
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Returns two lists of (source, gradient): one of local sources, one of all others."""
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients, **kwargs)))
        local = [pair for pair in pairs if variable_id(pair[0]) in self._hvtrain_local]
        shared = [pair for pair in pairs if variable_id(pair[0]) not in self._hvtrain_local]
        return local, shared
