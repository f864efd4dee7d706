"""Which errors mean that a rank was lost: TensorFlow and Horovod say it in many ways."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

# What TensorFlow says when a message between ranks broke: the words of Horovod, Gloo or NCCL, or the operation's
# type. Not the bare word Horovod: a traceback out of the user's data function may hold it in the name of a folder.
_LOST = re.compile(
    r"Horovod has been shut down|gloo/[\w/]+\.cc:\d+\]|(nccl\w+ failed|NCCL async error):"
    r"|Horovod(Grouped)?(Allreduce|Allgather|Broadcast|Alltoall|Reducescatter)"
)


@contextlib.contextmanager
def lost_ranks_told() -> Iterator[None]:
    """TensorFlow's error for a broken message becomes the one that Horovod's elastic loop waits for.

    Only UnknownError: Horovod's kernels raise others for what each retry would meet again, as tensors whose
    shapes differ between ranks.
    """
    try:
        yield
    except tf.errors.UnknownError as error:
        if _LOST.search(error.message):
            raise HorovodInternalError(error.message) from error
        raise


def tells_of_lost_ranks(error: BaseException) -> bool:
    """True for an error that came because a message between ranks broke."""
    return bool(_LOST.search(str(error)))
