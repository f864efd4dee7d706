"""How gradients are put together into messages that are reduced while others are still computed. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def in_buckets(sizes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Positions of tensors, in the order in which they are ready, by bucket; one is closed once it holds bucket_bytes.

    >>> in_buckets([10, 10, 10, 30, 5], 25)
    [[0, 1, 2], [3], [4]]
    """
    buckets: list[list[int]] = []
    filled = bucket_bytes
    for position, size in enumerate(sizes):
        if filled >= bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(position)
        filled += size
    return buckets
