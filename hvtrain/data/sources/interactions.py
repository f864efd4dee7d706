"""Makes random clicks and purchases for recommenders, with known best possible results."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvtrain.data.sources.memory import MemorySource, check_counts, take
from hvtrain.errors import ConfigError

# Exponent of the Zipf distribution of ids. As in real logs, most ids are rare.
ZIPF = 1.3
# Share of purchases drawn from the user's own cluster; all others are drawn from all items.
LOYALTY = 0.8


def clicks(
    num_train: int = 200_000,
    num_test: int = 20_000,
    category_sizes: Sequence[int] = (1000, 300, 100, 20, 5),
    seed: int = 0,
) -> MemorySource:
    """Makes a source of clicks like Criteo's: numbers, categories of different sizes, and targets 0 or 1.

    The inputs are {"numbers": float32 [4], "categories": int32 [features]}. All features share
    one range of ids: those of a feature begin where those of the previous feature end. The probability
    of a click is sigmoid(logit). The logit is linear in the numbers, plus an effect of each id, plus
    the dot product of hidden vectors of the first two features' ids. The fact best_auc is the AUC
    of these logits on the test part; a model can exceed it only by chance.

    Args:
        num_train, num_test: Number of examples of each split.
        category_sizes: Number of ids of each categorical feature, at least two features.
        seed: Seed of the random data, independent of the run's seed.

    Raises:
        ConfigError: A number is out of range, or there are fewer than two features.
    """
    if len(category_sizes) < 2:
        raise ConfigError(
            f"dataset.category_sizes={list(category_sizes)} has fewer than two features; add some"
        )
    check_counts(1, num_train=num_train, num_test=num_test, category_sizes=min(category_sizes))
    check_counts(seed=seed)
    from sklearn.metrics import roc_auc_score

    random = np.random.default_rng(seed)
    num_examples = num_train + num_test
    effects = random.normal(0, 0.6, sum(category_sizes))
    hidden = random.normal(0, 0.8, (sum(category_sizes), 4))

    numbers = random.normal(size=(num_examples, 4))
    ids = random.zipf(ZIPF, (num_examples, len(category_sizes))) % category_sizes
    categories = ids + np.cumsum([0, *category_sizes])[:-1]
    first, second = categories[:, :2].T
    logits = 0.4 * numbers.sum(axis=1) + effects[categories].sum(axis=1)
    logits += (hidden[first] * hidden[second]).sum(axis=1) - 1
    is_click = (random.logistic(size=num_examples) < logits).astype(np.int32)

    return _source(
        "clicks",
        {"numbers": numbers, "categories": categories},
        is_click,
        num_train,
        category_sizes=tuple(category_sizes),
        best_auc=roc_auc_score(is_click[num_train:], logits[num_train:]),
    )


def purchases(
    num_train: int = 50_000,
    num_test: int = 10_000,
    num_users: int = 2000,
    num_items: int = 200,
    num_clusters: int = 20,
    seed: int = 0,
) -> MemorySource:
    """Makes a source of purchases: which user bought which item, for retrieval.

    The inputs are {"query": the user, int32 [1], "item": the item, int32 [1]}; the target is the
    item's row in the catalogue. User n and item n belong to cluster n % num_clusters. With probability
    LOYALTY, a user buys a random item of the same cluster, otherwise any item at random. So the best
    possible recall at k, for clusters of k items, is LOYALTY + (1 - LOYALTY) / num_clusters.

    Args:
        num_train, num_test: Number of examples of each split.
        num_users, num_clusters: Numbers of users and of clusters.
        num_items: Number of items, a multiple of num_clusters.
        seed: Seed of the random data, independent of the run's seed.

    Raises:
        ConfigError: A number is out of range, or num_items is not a multiple of num_clusters.
    """
    check_counts(
        1,
        num_train=num_train,
        num_test=num_test,
        num_users=num_users,
        num_items=num_items,
        num_clusters=num_clusters,
    )
    check_counts(seed=seed)
    if num_items % num_clusters:
        raise ConfigError(
            f"dataset.num_items={num_items} is not a multiple of num_clusters={num_clusters}; change one of them"
        )
    random = np.random.default_rng(seed)
    num_examples = num_train + num_test
    users = random.integers(num_users, size=num_examples)
    items = random.integers(num_items, size=num_examples)
    is_loyal = random.random(num_examples) < LOYALTY
    own = items - items % num_clusters + users % num_clusters
    items = np.where(is_loyal, own, items)

    return _source(
        "purchases",
        {"query": users[:, None], "item": items[:, None]},
        items,
        num_train,
        query_sizes=[num_users],
        item_sizes=[num_items],
        catalogue=np.arange(num_items)[:, None],
    )


def _source(
    name: str, inputs: Any, targets: np.ndarray, num_train: int, **facts: Any
) -> MemorySource:
    arrays = (inputs, targets)
    splits = {
        "train": take(arrays, slice(num_train)),
        "test": take(arrays, slice(num_train, None)),
    }
    return MemorySource(name, lambda: splits, "drawn at random", more_facts=facts)
