"""Text that a causal model writes, one token after the other."""

from collections.abc import Sequence

import keras
import numpy as np


def continuation(
    model: keras.Model,
    prompt: Sequence[int],
    number: int,
    length: int,
    temperature: float = 0.7,
    seed: int = 0,
    end: int | None = None,
) -> list[int]:
    """The tokens that a model writes after a prompt of at least one; the same for the same seed.

    Args:
        model: from tokens [batch, length] to logits [batch, length, vocabulary]; those at a place do not depend on
            later tokens.
        number: of tokens; fewer if it writes `end`, which is not returned.
        length: of the model. It sees that many of the newest tokens.
        temperature: 0 takes the likeliest token each time; 1 draws them as likely as the model says.
    """
    random, tokens = np.random.default_rng(seed), list(prompt)
    for _ in range(number):
        seen = tokens[-length:]
        row = np.zeros((1, length), np.int32)
        row[0, : len(seen)] = seen
        logits = keras.ops.convert_to_numpy(model(row, training=False))[0, len(seen) - 1].astype(np.float64)
        # The largest sum with Gumbel noise is a draw from softmax(logits / temperature).
        token = int(np.argmax(logits + temperature * random.gumbel(size=len(logits))))
        if token == end:
            break
        tokens.append(token)
    return tokens[len(prompt) :]
