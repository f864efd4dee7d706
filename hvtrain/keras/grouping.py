"""Which gradients travel together."""

from collections.abc import Sequence
from typing import Any

from hvtrain.core.buckets import in_buckets


def in_groups(
    gradients: Sequence[Any], dense: list[int], ids: list[int], groups: int | list[set[int]] | None, bucket_bytes: int
) -> list[list[int]]:
    """Positions of the dense gradients that travel together; those of one group have one type.

    Args:
        gradients: of all variables, of which the positions in `dense` are to travel.
        ids: of the gradients' variables.
        groups: number of groups for each type, or ids of variables whose gradients travel together.
        bucket_bytes: without groups, the size of a message, the last variables first.
    """
    parts = [dense]
    if isinstance(groups, list):
        parts = [[i for i in dense if ids[i] in group] for group in groups]
        parts += [[i] for i in dense if not any(ids[i] in group for group in groups)]
    elif bucket_bytes and groups is None:
        last_first = dense[::-1]
        # A shape that is only known at run time counts as 0 bytes.
        sizes = [(gradients[i].shape.num_elements() or 0) * gradients[i].dtype.size for i in last_first]
        parts = [[last_first[position] for position in bucket] for bucket in in_buckets(sizes, bucket_bytes)]
    found = []
    for part in parts:
        for dtype in dict.fromkeys(gradients[i].dtype for i in part):
            same = [i for i in part if gradients[i].dtype == dtype]
            length = -(-len(same) // (groups if isinstance(groups, int) else 1))
            found += [same[start : start + length] for start in range(0, len(same), length)]
    return found
