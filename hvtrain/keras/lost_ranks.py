"""Recognizes errors that mean a lost rank, which TensorFlow and Horovod report in many ways."""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

# Messages of Horovod, Gloo or NCCL, or the type of the operation that failed. The bare word Horovod is not enough:
# a traceback out of the user's data function may hold it in the name of a folder.
_LOST = re.compile(
    r"Horovod has been shut down|gloo/[\w/]+\.cc:\d+\]|(nccl\w+ failed|NCCL async error):"
    r"|Horovod(Grouped)?(Allreduce|Allgather|Broadcast|Alltoall|Reducescatter)"
)


@contextlib.contextmanager
def raise_for_elastic() -> Iterator[None]:
    """Turns TensorFlow's error for a lost rank into HorovodInternalError, which Horovod's elastic loop catches.

    Only UnknownError: Horovod's kernels raise other types for errors that a retry would repeat, such as shapes that
    differ between ranks.
    """
    try:
        yield
    except tf.errors.UnknownError as error:
        if _LOST.search(error.message):
            raise HorovodInternalError(error.message) from error
        raise


def is_lost_rank_error(error: BaseException) -> bool:
    """True if communication between ranks broke."""
    return bool(_LOST.search(str(error)))
