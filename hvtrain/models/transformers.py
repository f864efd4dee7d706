"""A transformer over tokens: predicts the next token, masked tokens, or the class of a text."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import Model, layers, ops

from hvtrain.errors import ConfigError
from hvtrain.models.networks import check_counts, logits, token_mask

# Standard deviation of the first weights, as in GPT-2 and BERT.
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
    """Builds pre-norm blocks of attention and MLP over learned positions, from tokens to logits.

    Like GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"). The
    token's embedding and the head share one matrix, in float32. 1,071,872 parameters with the
    defaults, 128 tokens and a vocabulary of 2,048.

    Args:
        input_spec: one example: a row of tokens, int, of one length, or of any length up to
            `length`.
        vocabulary_size: vocabulary size of the data set's tokenizer.
        causal: each position sees itself and earlier ones; False: all. A fact of dataset=text.
        blocks: number of blocks.
        width: number of units of each position.
        heads: attention heads, which share the width.
        mlp_ratio: units of the MLP's inner layer, relative to the width.
        dropout: fraction dropped after the embeddings and at the end of attention and MLP.
        mask_zero: token 0 is padding, which no position sees; give it the weight 0 as a target.
            None: true if `padded`, unless `causal` without a mean over all positions: no causal
            position sees the padding after it.
        length: the largest number of tokens, for rows of different lengths. A fact of dataset=text.
        padded: rows are filled up with token 0. A fact of dataset=text.
        output_shape: an example's output shape, from the task. With one axis (logits of the whole text)
            the head is a dense layer on the mean over all positions, not the shared matrix.
    """
    # Logits of the whole text.
    num_logits = output_shape[0] if output_shape is not None and len(output_shape) == 1 else None
    if mask_zero is None:
        mask_zero = padded and (not causal or num_logits is not None)
    shape = tuple(getattr(input_spec, "shape", ()))
    # Learned positions are made for the longest row.
    length = shape[0] or length if len(shape) == 1 else None
    if not length or not input_spec.dtype.is_integer:
        raise ConfigError(
            f"transformer was given inputs {input_spec}; it needs a row of tokens as whole "
            "numbers, of one length: dataset=text gives them"
        )
    check_counts("transformer", blocks=blocks, heads=heads)
    if width % heads:
        raise ConfigError(
            f"transformer was given width={width} and heads={heads}; the heads share the width evenly"
        )
    tokens = keras.Input(shape, dtype="int32", name="tokens")

    # In float32 whatever the policy, since it is the head too: losses of logits in bfloat16 lose digits.
    embedding = layers.ReversibleEmbedding(
        vocabulary_size,
        width,
        embeddings_initializer=_normal(),
        dtype="float32",
        name="token_embedding",
    )
    # 0, 1, 2, ... for each example.
    positions = ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    position_embedding = layers.Embedding(
        length, width, embeddings_initializer=_normal(), name="place_embedding"
    )
    x = layers.Add(name="embedding")([embedding(tokens), position_embedding(positions)])
    x = layers.Dropout(dropout, name="embedding_dropout")(x)

    # Not as Keras's mask, which a sum of two embeddings drops. [batch, 1, length]: the same for
    # each position that attends.
    is_text = mask = None
    if mask_zero:
        is_text = token_mask(tokens, 0)
        mask = ops.expand_dims(is_text, axis=1)
    for number in range(1, blocks + 1):
        x = _block(x, f"block{number}", causal, heads, mlp_ratio, dropout, mask)
    x = layers.LayerNormalization(epsilon=1e-5, name="norm")(x)
    if num_logits is not None:
        outputs = logits(layers.GlobalAveragePooling1D(name="pool")(x, mask=is_text), num_logits)
    else:
        outputs = embedding(x, reverse=True)
    return Model(tokens, outputs, name="transformer")


def _block(
    x: Any,
    name: str,
    causal: bool,
    heads: int,
    mlp_ratio: int,
    dropout: float,
    mask: Any,
) -> Any:
    """Adds to x attention over the positions of the mask, or all, and then an MLP; returns the sum."""
    width = x.shape[-1]
    attention = layers.MultiHeadAttention(
        heads, width // heads, kernel_initializer=_normal(), name=f"{name}_attention"
    )
    # Normalized before each part, not after: the sum that runs through all blocks stays as it is.
    hidden = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm1")(x)
    hidden = attention(hidden, hidden, use_causal_mask=causal, attention_mask=mask)
    hidden = layers.Dropout(dropout, name=f"{name}_dropout1")(hidden)
    x = layers.Add(name=f"{name}_add1")([x, hidden])

    hidden = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm2")(x)
    hidden = layers.Dense(
        mlp_ratio * width,
        "gelu",
        kernel_initializer=_normal(),
        name=f"{name}_mlp1",
    )(hidden)
    hidden = layers.Dense(width, kernel_initializer=_normal(), name=f"{name}_mlp2")(hidden)
    hidden = layers.Dropout(dropout, name=f"{name}_dropout2")(hidden)
    return layers.Add(name=f"{name}_add2")([x, hidden])


def _normal() -> keras.initializers.Initializer:
    # A new one for each layer, since an object draws the same numbers every time it is called.
    return keras.initializers.RandomNormal(stddev=STDDEV)
