"""Checks of arguments that DistributedOptimizer and DistributedGradientTape share, before a step could hang on them."""

from typing import Any

import horovod.tensorflow as hvd
import keras


def check_arguments(op: int, predivide_factor: float, groups: Any, process_set: Any) -> None:
    """Raises ValueError for arguments that exclude each other."""
    if predivide_factor != 1.0 and op != hvd.Average:
        raise ValueError("gradient_predivide_factor needs op=Average; leave one of the two out")
    if op not in (hvd.Average, hvd.Sum, hvd.Adasum):
        raise ValueError("gradients are reduced by Average, Sum or Adasum; choose one of these as op")
    if op == hvd.Adasum and process_set.process_set_id not in (None, 0):
        raise ValueError("Adasum works over all ranks only; leave process_set out")
    if op == hvd.Adasum and hvd.size() & (hvd.size() - 1):
        raise ValueError(f"Adasum needs 2, 4, 8, ... ranks and there are {hvd.size()}; use op=Average, or other ranks")
    if op == hvd.Adasum and hvd.size() > 1 and not hvd.mpi_enabled():
        raise ValueError("Adasum needs MPI and this job runs on Gloo; start the ranks with horovodrun --mpi or mpirun")
    is_number = isinstance(groups, int) and groups > 0
    if groups is not None and not is_number and not isinstance(groups, list):
        raise ValueError(f"groups={groups!r} is neither a number above 0 nor a list of lists of variables")


def local_weights(local_layers: Any) -> list[Any]:
    """Trainable weights of one Keras layer or of several. Raises ValueError for anything else."""
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers or [])
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(f"local_layers holds a {type(layer).__name__}; Keras layers are needed")
        if not layer.built:
            raise ValueError(f"local layer {layer.name} has no weights yet; build the model before its optimizer")
    return [weight for layer in layers for weight in layer.trainable_weights]
