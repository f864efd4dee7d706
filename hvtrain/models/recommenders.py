"""Networks for recommenders: DLRM for clicks, and two towers for retrieval.

All categorical features of a tower share one embedding table: their ids are in one space, and one
lookup serves all of them.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from hvtrain.data.source import symbolic
from hvtrain.models.networks import logits


def dlrm(
    input_spec: Any,
    category_sizes: Sequence[int],
    num_outputs: int,
    width: int = 16,
    bottom: Sequence[int] = (64,),
    top: Sequence[int] = (64, 32),
) -> keras.Model:
    """Deep learning recommendation model of Naumov et al. 2019 (arXiv:1906.00091).

    Dense layers turn the numbers into a vector; the table has one for each category. The dot
    products of all pairs of these vectors, and the first vector itself, go through dense layers to
    the logits.

    Args:
        input_spec: {"numbers": float [n], "categories": int [features]}.
        category_sizes: ids of each feature, whose sum is the number of rows of the table.
        num_outputs: logits of an example.
        width: numbers in each vector.
        bottom: units of the hidden layers before the products.
        top: units of the hidden layers after them.
    """
    inputs = symbolic(input_spec)
    numbers = _dense(inputs["numbers"], [*bottom, width], "bottom")
    table = layers.Embedding(sum(category_sizes), width, name="category_table")
    rows = ops.concatenate([numbers[:, None], table(inputs["categories"])], axis=1)
    products = ops.einsum("bid,bjd->bij", rows, rows)
    # Below the diagonal stands each pair once.
    below = np.flatnonzero(np.tri(len(category_sizes) + 1, k=-1))
    pairs = ops.take(layers.Flatten()(products), below, axis=1)
    features = ops.concatenate([numbers, pairs], axis=1)
    return keras.Model(inputs, logits(_dense(features, top, "top"), num_outputs), name="dlrm")


def two_tower(
    input_spec: Any,
    query_sizes: Sequence[int],
    item_sizes: Sequence[int],
    width: int = 32,
    hidden: Sequence[int] = (64,),
) -> keras.Model:
    """A tower for queries and one for items, each a table and dense layers, for task=retrieval.

    The output is [2, width]: the vector of the query and that of the item, of length 1. Their
    product is the score, so that a search for nearest neighbours finds a query's items.

    Args:
        input_spec: {"query": int [features], "item": int [features]}.
        query_sizes, item_sizes: ids of each feature.
        width: numbers in a vector, in the tables too.
        hidden: units of the hidden layers of each tower.
    """
    inputs = symbolic(input_spec)
    vectors = []
    for name, sizes in {"query": query_sizes, "item": item_sizes}.items():
        rows = layers.Embedding(sum(sizes), width, name=f"{name}_table")(inputs[name])
        features = _dense(layers.Flatten()(rows), hidden, name)
        # In float32 whatever the policy, because losses in bfloat16 lose digits.
        vector = layers.Dense(width, dtype="float32", name=f"{name}_vector")(features)
        vectors.append(ops.normalize(vector))
    return keras.Model(inputs, ops.stack(vectors, axis=1), name="two_tower")


def _dense(x: Any, units: Sequence[int], name: str) -> Any:
    for number, width in enumerate(units, start=1):
        x = layers.Dense(width, activation="relu", name=f"{name}{number}")(x)
    return x
