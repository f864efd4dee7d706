"""Arrays on their way from one rank to others, in messages of bounded size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hvtrain.strategies.comm import Comm

# A message is in memory a few times while it is packed; and MPI counts its bytes in 31 bits.
MESSAGE_BYTES = 64 << 20

Arrays = dict[str, np.ndarray]


def bring(
    arrays: Arrays | None, root: int, comm: Comm, wanted: bool, message_bytes: int = MESSAGE_BYTES
) -> Arrays | None:
    """The root's arrays, on the ranks that want them; None on the others (every rank)."""
    is_root = comm.topology.rank == root
    own = arrays if is_root else None
    layout = comm.broadcast(own and {name: (array.shape, array.dtype) for name, array in own.items()}, root)
    if own is None:
        shapes = layout if wanted else {}
        own = {name: np.empty(shape, dtype) for name, (shape, dtype) in shapes.items()}
    else:
        own = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in own.items()}
    num_bytes = sum(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in layout.values())
    pieces = _pieces(own, message_bytes)
    for _ in range(-(-num_bytes // message_bytes)):
        parts = next(pieces, [])
        message = comm.broadcast(np.concatenate(parts) if is_root else None, root)
        if not is_root and wanted:
            end = 0
            for part in parts:
                begin, end = end, end + part.size
                part[:] = message[begin:end]
    return own if wanted else None


def _pieces(arrays: Arrays, message_bytes: int) -> Iterator[list[np.ndarray]]:
    """The bytes of the arrays where they lie, in runs of message_bytes; the last one is shorter."""
    run: list[np.ndarray] = []
    room = message_bytes
    for array in arrays.values():
        rest = array.reshape(-1).view(np.uint8)
        while rest.size:
            part, rest = rest[:room], rest[room:]
            run.append(part)
            room -= part.size
            if not room:
                yield run
                run, room = [], message_bytes
    if run:
        yield run
