"""Networks for recommenders: DLRM for predicting clicks, and two towers for retrieval.

All categorical features of DLRM, or of one tower, share an embedding table: their ids do not
overlap, so a single lookup serves all of them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import Model, layers, ops

from hvtrain.data.source import symbolic
from hvtrain.models.networks import logits


def dlrm(
    input_spec: Any,
    category_sizes: Sequence[int],
    num_outputs: int,
    width: int = 16,
    bottom: Sequence[int] = (64,),
    top: Sequence[int] = (64, 32),
) -> Model:
    """Builds the deep learning recommendation model of Naumov et al. 2019 (arXiv:1906.00091).

    Dense layers turn the numbers into a vector, and the table has a vector for each category. The dot
    products of all pairs of vectors, together with the numbers' vector, are the input of the dense
    layers that lead to the logits.

    Args:
        input_spec: {"numbers": float [n], "categories": int [features]}.
        category_sizes: number of ids of each feature; their sum is the number of rows of the table.
        num_outputs: number of logits of an example.
        width: length of each vector.
        bottom: units of the hidden layers before the products.
        top: units of the hidden layers after the products.
    """
    inputs = symbolic(input_spec)
    numbers = _dense(inputs["numbers"], [*bottom, width], "bottom")
    table = layers.Embedding(sum(category_sizes), width, name="category_table")
    rows = ops.concatenate([numbers[:, None], table(inputs["categories"])], axis=1)
    products = ops.einsum("bid,bjd->bij", rows, rows)
    # Indices of the entries below the diagonal, which hold each pair once.
    below = np.flatnonzero(np.tri(len(category_sizes) + 1, k=-1))
    pairs = ops.take(layers.Flatten()(products), below, axis=1)
    features = ops.concatenate([numbers, pairs], axis=1)
    return Model(inputs, logits(_dense(features, top, "top"), num_outputs), name="dlrm")


def two_tower(
    input_spec: Any,
    query_sizes: Sequence[int],
    item_sizes: Sequence[int],
    width: int = 32,
    hidden: Sequence[int] = (64,),
) -> Model:
    """Builds a tower for queries and one for items, each a table and dense layers, for task=retrieval.

    The output has shape [batch, 2, width]: the unit vectors of a query and of its item. Their dot
    product is the score, so a nearest-neighbor search finds a query's items.

    Args:
        input_spec: {"query": int [features], "item": int [features]}.
        query_sizes: number of ids of each feature of a query.
        item_sizes: number of ids of each feature of an item.
        width: length of the vectors, also of those in the tables.
        hidden: units of the hidden layers of each tower.
    """
    inputs = symbolic(input_spec)
    vectors = []
    for name, sizes in {"query": query_sizes, "item": item_sizes}.items():
        rows = layers.Embedding(sum(sizes), width, name=f"{name}_table")(inputs[name])
        features = _dense(layers.Flatten()(rows), hidden, name)
        # In float32 regardless of the dtype policy, because losses in bfloat16 lose digits.
        vector = layers.Dense(width, dtype="float32", name=f"{name}_vector")(features)
        vectors.append(ops.normalize(vector))
    return Model(inputs, ops.stack(vectors, axis=1), name="two_tower")


def _dense(x, units: Sequence[int], name: str):
    for number, width in enumerate(units, start=1):
        x = layers.Dense(width, activation="relu", name=f"{name}{number}")(x)
    return x
