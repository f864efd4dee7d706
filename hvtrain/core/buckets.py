"""Groups gradients into messages that are all-reduced while other gradients are still being computed.

Pure.
"""

from collections.abc import Sequence


def in_buckets(
    sizes: Sequence[int], bucket_bytes: int, alone_bytes: int = 4 << 20
) -> list[list[int]]:
    """Groups tensors into buckets; returns the positions of each bucket's tensors.

    A bucket is full once it has at least bucket_bytes. Tensors of alone_bytes or more get a bucket of
    their own, because Horovod copies tensors that share a message into a buffer and out again.

    Args:
        sizes: bytes of each tensor, in the order in which the tensors become ready.
        bucket_bytes: size at which a bucket is full.
        alone_bytes: size from which a tensor is sent alone.

    >>> in_buckets([10, 10, 10, 30, 5], 25)
    [[0, 1, 2], [3], [4]]
    >>> in_buckets([10, 30, 10, 10, 5], 25, alone_bytes=20)
    [[0, 2, 3], [1], [4]]
    """
    buckets = []
    # The current shared bucket and its bytes. It starts full, so that the first small tensor opens one.
    shared: list[int] = []
    filled = bucket_bytes
    for position, size in enumerate(sizes):
        if size >= alone_bytes:
            buckets.append([position])
            continue
        if filled >= bucket_bytes:
            shared = []
            filled = 0
            buckets.append(shared)
        shared.append(position)
        filled += size
    return buckets
