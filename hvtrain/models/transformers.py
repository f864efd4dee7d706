"""A transformer over tokens, which predicts the next token, masked tokens, or the class of a text."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import Model, layers, ops

from hvtrain.errors import ConfigError
from hvtrain.models.networks import check_counts, logits, token_mask

# Standard deviation of the initial weights, as in GPT-2 and BERT.
STDDEV = 0.02


def transformer(
    input_spec: tf.TensorSpec,
    vocabulary_size: int,
    causal: bool = True,
    blocks: int = 4,
    width: int = 128,
    heads: int = 4,
    mlp_ratio: int = 4,
    dropout: float = 0.1,
    mask_zero: bool | None = None,
    length: int | None = None,
    padded: bool = False,
    output_shape: Sequence[Any] | None = None,
) -> Model:
    """Builds a transformer of pre-norm blocks with learned positions, from tokens to logits.

    The architecture is that of GPT-2 (Radford et al. 2019, "Language Models are Unsupervised
    Multitask Learners"). The token embedding and the head share one matrix, in float32. With the
    defaults, 128 tokens and a vocabulary of 2,048, it has 1,071,872 parameters.

    Args:
        input_spec: spec of one example: a row of integer tokens of shape [length], or of any length up
            to `length`.
        vocabulary_size: vocabulary size of the data set's tokenizer.
        causal: True: each position sees itself and earlier ones; False: it sees all. A fact of
            dataset=text.
        blocks: number of blocks.
        width: number of features at each position.
        heads: number of attention heads, each of width / heads features.
        mlp_ratio: units of the MLP's inner layer, as a multiple of the width.
        dropout: fraction dropped after the embeddings and at the end of attention and MLP.
        mask_zero: True: token 0 is padding, which no position sees; give it the weight 0 as a target.
            None: like `padded`, except that a causal model with an output at each position needs no
            mask, since no position sees the padding after it.
        length: the largest number of tokens, for rows of different lengths. A fact of dataset=text.
        padded: True if short rows are padded with token 0. A fact of dataset=text.
        output_shape: shape of an example's output, from the task. With one axis (logits of the whole text)
            the head is a dense layer on the mean over all positions, not the shared matrix.

    Raises:
        ConfigError: the inputs are not a row of tokens, a count is below 1, or the heads do not divide
            the width evenly.
    """
    # Set if there is one output for the whole text.
    num_logits = output_shape[0] if output_shape and len(output_shape) == 1 else None
    if mask_zero is None:
        mask_zero = padded and (not causal or num_logits is not None)
    shape = tuple(getattr(input_spec, "shape", ()))
    if len(shape) != 1 or not input_spec.dtype.is_integer or not (shape[0] or length):
        raise ConfigError(
            f"transformer was given inputs {input_spec}; it needs a row of integer tokens with a known "
            "maximum length: choose dataset=text"
        )
    check_counts("transformer", blocks=blocks, heads=heads)
    if width % heads:
        raise ConfigError(
            f"transformer was given width={width} and heads={heads}; the heads must divide the width evenly"
        )
    tokens = keras.Input(shape, dtype="int32", name="tokens")

    # In float32 regardless of the dtype policy, since it is also the head: bfloat16 losses lose digits.
    embedding = layers.ReversibleEmbedding(
        vocabulary_size,
        width,
        embeddings_initializer=_normal(),
        dtype="float32",
        name="token_embedding",
    )
    # 0, 1, 2, ... for each example.
    positions = ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    # There is a learned position for each token of the longest row.
    position_embedding = layers.Embedding(
        shape[0] or length, width, embeddings_initializer=_normal(), name="place_embedding"
    )
    x = layers.Add(name="embedding")([embedding(tokens), position_embedding(positions)])
    x = layers.Dropout(dropout, name="embedding_dropout")(x)

    # Passed explicitly, since the sum of the two embeddings drops Keras's own mask.
    is_text = token_mask(tokens, 0) if mask_zero else None
    for number in range(1, blocks + 1):
        x = _block(x, f"block{number}", causal, heads, mlp_ratio, dropout, is_text)
    x = layers.LayerNormalization(epsilon=1e-5, name="norm")(x)
    if num_logits:
        outputs = logits(layers.GlobalAveragePooling1D(name="pool")(x, mask=is_text), num_logits)
    else:
        outputs = embedding(x, reverse=True)
    return Model(tokens, outputs, name="transformer")


def _block(x, name: str, causal: bool, heads: int, mlp_ratio: int, dropout: float, is_text):
    """Adds attention, over all positions or only those in is_text, and then an MLP.

    x has the shape [batch, length, width]; is_text is a mask of shape [batch, length], or None.
    """
    width = x.shape[-1]
    attention = layers.MultiHeadAttention(
        heads, width // heads, kernel_initializer=_normal(), name=f"{name}_attention"
    )
    # Pre-norm: the input of each part is normalized, and the residual stream itself never is.
    hidden = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm1")(x)
    hidden = attention(hidden, hidden, use_causal_mask=causal, value_mask=is_text)
    hidden = layers.Dropout(dropout, name=f"{name}_dropout1")(hidden)
    x = layers.Add(name=f"{name}_add1")([x, hidden])

    hidden = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm2")(x)
    hidden = layers.Dense(
        mlp_ratio * width, "gelu", kernel_initializer=_normal(), name=f"{name}_mlp1"
    )(hidden)
    hidden = layers.Dense(width, kernel_initializer=_normal(), name=f"{name}_mlp2")(hidden)
    hidden = layers.Dropout(dropout, name=f"{name}_dropout2")(hidden)
    return layers.Add(name=f"{name}_add2")([x, hidden])


def _normal() -> keras.initializers.Initializer:
    # A new object for each layer, since an object draws the same numbers in every call.
    return keras.initializers.RandomNormal(stddev=STDDEV)
