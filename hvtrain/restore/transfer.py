"""Sends arrays from one rank to others, in messages of bounded size."""

from collections.abc import Iterator

import numpy as np

from hvtrain.strategies.base import Comm

# A message is in memory several times while it is packed; and MPI counts its bytes in 31 bits.
MESSAGE_BYTES = 64 << 20

Arrays = dict[str, np.ndarray]


def send_arrays(
    arrays: Arrays | None, root: int, comm: Comm, wanted: bool, message_bytes: int = MESSAGE_BYTES
) -> Arrays | None:
    """The root's arrays, on the ranks that want them; None on the others (every rank)."""
    is_root = comm.topology.rank == root
    own = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in (arrays or {}).items()}
    layout = comm.broadcast({name: (array.shape, array.dtype) for name, array in own.items()}, root)
    if not is_root:
        own = {name: np.empty(shape, dtype) for name, (shape, dtype) in layout.items()} if wanted else {}
    num_bytes = sum(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in layout.values())
    chunks = _chunks(own, message_bytes)
    for _ in range(-(-num_bytes // message_bytes)):
        parts = next(chunks, [])
        message = comm.broadcast(np.concatenate(parts) if is_root else None, root)
        if not is_root:
            end = 0
            for part in parts:
                begin, end = end, end + part.size
                part[:] = message[begin:end]
    return own if wanted else None


def _chunks(arrays: Arrays, chunk_bytes: int) -> Iterator[list[np.ndarray]]:
    """Views of the arrays' bytes, in lists of chunk_bytes together; the last list is shorter."""
    chunk: list[np.ndarray] = []
    room = chunk_bytes
    for array in arrays.values():
        rest = array.reshape(-1).view(np.uint8)
        while rest.size:
            part, rest = rest[:room], rest[room:]
            chunk.append(part)
            room -= part.size
            if not room:
                yield chunk
                chunk, room = [], chunk_bytes
    if chunk:
        yield chunk
