"""What stands around a model of keras-hub: its inputs as a data set gives them, its outputs as a task needs them."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import layers, ops

from hvtrain.data.preprocessing import symbolic
from hvtrain.errors import ConfigError
from hvtrain.models.networks import logits

TOKENS, MASK, SEGMENTS, POSITIONS = "token_ids", "padding_mask", "segment_ids", "mask_positions"


def fit_inputs(network: keras.Model, spec: Any, padding_token: int | None) -> tuple[Any, Any]:
    """Inputs of these tf.TensorSpecs, and what the network takes, made of them.

    A single array is the tokens or the image. What a text model takes besides is made of the tokens if it is missing:
    the mask of those that are not padding, one segment, and all places as those whose tokens are predicted. Raises
    ConfigError for inputs of other names, or with other numbers of axes.
    """
    inputs, has_names = symbolic(spec), isinstance(network.input, Mapping)
    wanted = dict(network.input) if has_names else {"image": network.input}
    if isinstance(inputs, Mapping):
        given = dict(inputs)
    else:
        given = {TOKENS if TOKENS in wanted else next(iter(wanted)): inputs}
    made = {name: _made(name, given, padding_token) for name in wanted if name not in given}
    given |= {name: one for name, one in made.items() if one is not None}
    if given.keys() != wanted.keys() or any(len(given[name].shape) != len(wanted[name].shape) for name in wanted):
        needed, came = (
            ", ".join(f"{name} {tuple(one.shape)}" for name, one in ones.items())
            for ones in (wanted, inputs if isinstance(inputs, Mapping) else given)
        )
        raise ConfigError(
            f"{type(network).__name__} takes {needed}, and the data set gives {came}; give it such inputs"
        )
    return inputs, given if has_names else given["image"]


def _made(name: str, given: Mapping[str, Any], padding_token: int | None) -> Any:
    """An input that follows from the tokens beside it (decoder_token_ids for decoder_padding_mask); None for others."""
    kind = next((kind for kind in (MASK, SEGMENTS, POSITIONS) if name.endswith(kind)), None)
    tokens = given.get(f"{name.removesuffix(kind)}{TOKENS}") if kind else None
    if tokens is None:
        return None
    if kind == SEGMENTS:
        return ops.zeros_like(tokens)
    if kind == POSITIONS:
        return ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    return ops.ones_like(tokens) if padding_token is None else ops.cast(ops.not_equal(tokens, padding_token), "int32")


def fit_outputs(outputs: Any, given: Any, shape: Sequence[Any] | None, dropout: float, has_head: bool) -> Any:
    """Float32 logits of that shape for an example; without a shape the network's own outputs.

    given: what the network took, with the mask of a text. has_head: its outputs are logits already.
    """
    if shape is None:
        return outputs
    if not has_head:
        mask = given.get(MASK) if isinstance(given, Mapping) else None
        outputs = _features(outputs, mask, is_pooled=len(shape) == 1)
        outputs = layers.Dropout(dropout, name="dropout")(outputs) if dropout else outputs
        outputs = logits(outputs, shape[-1])
    if len(shape) == 3 and len(outputs.shape) == 4 and tuple(outputs.shape[1:3]) != tuple(shape[:2]):
        outputs = layers.Resizing(*shape[:2], dtype="float32", name="resize")(outputs)
    if outputs.dtype != "float32":
        outputs = layers.Activation("linear", dtype="float32", name="float32")(outputs)
    return outputs


def _features(outputs: Any, mask: Any, is_pooled: bool) -> Any:
    """What the dense layer is put on: of an example, or of each of its places."""
    if isinstance(outputs, Mapping):
        if is_pooled and "pooled_output" in outputs:
            return outputs["pooled_output"]
        named = [name for name in outputs if name.endswith("sequence_output")]
        outputs = outputs[named[-1] if named else list(outputs)[-1]]
    if is_pooled and len(outputs.shape) == 4:
        return layers.GlobalAveragePooling2D(name="pool")(outputs)
    if is_pooled and len(outputs.shape) == 3:
        return layers.GlobalAveragePooling1D(name="pool")(outputs, mask=mask)
    return outputs
