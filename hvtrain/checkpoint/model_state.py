"""Copies the state of a model for a checkpoint, and restores it from one.

Does not communicate: its callers gather and broadcast. Does not touch the disk: store.py reads, writer.py writes.
"""

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from hvtrain.checkpoint.store import Arrays, Checkpoint, folder_name, whole_shape
from hvtrain.core.schedule import rate_factor
from hvtrain.errors import CheckpointError

if TYPE_CHECKING:  # Reading and writing files works without Keras, which takes seconds to import.
    import keras

# Prefix of the array names that rank_memory returns.
MEMORY = "memory/"
# Prefix of the names of those arrays that are equal on all ranks.
SAME = f"{MEMORY}same/"


def snapshot(
    model: "keras.Model", rank_states: list[Arrays], callback_arrays: Arrays, whole_values: Arrays
) -> Arrays:
    """Copies the arrays of a checkpoint, so that further training does not change them.

    Args:
        model: the model whose weights and optimizer are saved.
        rank_states: the arrays that rank_state() and rank_memory() return on each rank, by rank.
        callback_arrays: best weights of callbacks, by key.
        whole_values: the unsharded values of sharded_variables(model), by key; empty if there are none.
    """
    variables = _variables(model)
    # Whole tables take the places of their parts, so the order does not depend on sharding.
    arrays = {
        key: whole_values[key] if hasattr(variable, "rank_part") else variable.numpy()
        for key, variable in variables.items()
    }
    arrays |= {key: np.array(array) for key, array in callback_arrays.items()}
    for rank, state in enumerate(rank_states):
        arrays |= {f"rank/{rank}/{name}": array for name, array in state.items()}
    return arrays


def restore(
    checkpoint: Checkpoint,
    model: "keras.Model",
    prefixes: tuple[str, ...] = ("model/", "optimizer/"),
) -> None:
    """Restores the weights, the optimizer, or both.

    For a sharded variable, only the attribute `whole` is set; broadcast_model then gives each rank its part.

    Args:
        checkpoint: the checkpoint to restore from.
        model: the model, which must be built.
        prefixes: only variables whose keys begin with one of these are restored.

    Raises:
        CheckpointError: the checkpoint belongs to another model or optimizer. The message names the
            first difference, and nothing is set.
    """
    saved = sorted(item for item in checkpoint.arrays.items() if item[0].startswith(prefixes))
    sharded = sharded_variables(model)
    own = sorted(item for item in _variables(model).items() if item[0].startswith(prefixes))
    # This process may not know the whole shapes of slots that DistributedOptimizer(shard=True) divides, so only their
    # names are compared.
    unknown = {
        key for key, variable in sharded.items() if not hasattr(variable.rank_part, "num_rows")
    }
    # Everything is compared before anything is set.
    for own_item, saved_item in zip_longest(own, saved, fillvalue=(None, None)):
        key = own_item[0]
        if key in unknown and key == saved_item[0]:
            continue
        _compare(
            f"checkpoint {folder_name(checkpoint.step)} belongs to another model or optimizer: it",
            saved_item,
            own_item,
        )
    for (key, variable), (_, array) in zip(own, saved):
        if key in sharded:
            variable.whole = array
        else:
            variable.assign(array)


def sharded_variables(model: "keras.Model") -> dict[str, Any]:
    """Returns the weights and slots that are sharded over the ranks, by key."""
    return {
        key: variable
        for key, variable in _variables(model).items()
        if hasattr(variable, "rank_part")
    }


def rank_state(model: "keras.Model") -> Arrays:
    """Returns the state of one rank by name: seeds, the epoch's metrics, and the learning-rate factor."""
    variables = _rank_variables(model)
    for index, variable in enumerate(model.metrics_variables):
        variables[f"metric/{index:04d}"] = variable
    return {name: variable.numpy() for name, variable in variables.items()}


def restore_rank(state: Arrays, model: "keras.Model") -> None:
    """Restores the seeds and the learning-rate factor that rank_state saved; seeds without saved state are kept.

    The metrics are left to EpochMetrics, since Keras resets them when the epoch begins.

    Raises:
        CheckpointError: a saved array has another shape.
    """
    for name, variable in _rank_variables(model).items():
        if name in state:
            _compare("the checkpoint", (name, state[name]), (name, variable))
            variable.assign(state[name])


def keeps_memory(model: "keras.Model") -> bool:
    """True if rank_memory has something to save; the same on all ranks."""
    return bool(_memory_variables(model))


def rank_memory(model: "keras.Model", is_chief: bool) -> Arrays:
    """Returns the optimizer state that checkpoints keep by rank, such as compression errors.

    It may be as large as the weights; most optimizers have none. Arrays that are equal on
    all ranks (see SAME) are returned only by the chief.
    """
    return {
        name: variable.numpy()
        for name, variable in _memory_variables(model).items()
        if is_chief or not name.startswith(SAME)
    }


def restore_memory(memory: Arrays, model: "keras.Model") -> None:
    """Restores what rank_memory returned; state of another strategy is ignored."""
    for name, variable in _memory_variables(model).items():
        if name in memory and memory[name].shape == tuple(variable.shape):
            variable.assign(memory[name])


def _memory_variables(model: "keras.Model") -> dict[str, Any]:
    variables = getattr(model.optimizer, "rank_variables", {})
    return {f"{MEMORY}{name}": variable for name, variable in variables.items()}


def _variables(model: "keras.Model") -> dict[str, Any]:
    """Returns the variables that are equal on all ranks, or sharded over them, by key."""
    groups = {"model": model.weights, "optimizer": model.optimizer.variables}
    return {
        f"{group}/{index:04d}/{variable.path}": variable
        for group, variables in groups.items()
        for index, variable in enumerate(variables)
    }


def seeds_of(model: "keras.Model") -> list[Any]:
    """Returns the seeds of dropout and other random layers."""
    # model.variables has them; model.weights does not.
    weights = {id(variable) for variable in model.weights}
    return [variable for variable in model.variables if id(variable) not in weights]


def _rank_variables(model: "keras.Model") -> dict[str, Any]:
    """Returns variables that are each rank's own, by key."""
    variables = {f"seed/{index:04d}": variable for index, variable in enumerate(seeds_of(model))}
    factor = rate_factor(model)
    if factor is not None:  # The optimizer's own variables do not include it.
        variables["rate/factor"] = factor
    return variables


def _compare(subject: str, saved: tuple[str | None, Any], own: tuple[str | None, Any]) -> None:
    """Raises CheckpointError unless two arrays have the same name and shape. One of them may be missing.

    Args:
        subject: begins the message.
        saved: name and array in the checkpoint; (None, None): missing.
        own: name and variable in this run; (None, None): missing.
    """

    def describe(name, array):
        return f"{name} of shape {whole_shape(array)}" if name else "nothing"

    if describe(*saved) != describe(*own):
        raise CheckpointError(
            f"{subject} holds {describe(*saved)} where this run has {describe(*own)}; "
            "use the settings it was made with, or another run.dir"
        )
