"""Receipts of a run: digests of its weights and slots at each checkpoint, in receipts.jsonl.

Does not communicate.

The file has two kinds of lines. Each start adds a line with the facts on which the bits may depend,
{"start": DIGEST, "first_step": 0, "facts": {KIND: {NAME: VALUE}}}; "facts" is left out if an earlier
start has equal facts. Each checkpoint adds a receipt, {"step": 44, "start": DIGEST, "digests": {KEY:
DIGEST}}, with the keys of the checkpoint's arrays. If an earlier start had already reached that step,
"repeated" tells whether the bits are the same.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvtrain.checkpoint.store import Arrays, Meta, ShardedTable
from hvtrain.checkpoint.writer import Writer
from hvtrain.errors import StorageError, in_one_line
from hvtrain.system.files import append_text, is_own_file, read_file, whole_lines, write_atomic
from hvtrain.system.run_files import RECEIPTS_FILE

log = logging.getLogger(__name__)

# Facts by kind (data, settings, ...) and name.
Facts = dict[str, dict[str, Any]]
# Lines of the file.
Lines = list[dict[str, Any]]
# Digests of arrays, by the arrays' keys in the checkpoint.
Digests = dict[str, str]

# Size of the file above which every second receipt of the older half is dropped.
MAX_BYTES = 8 << 20


@dataclass(frozen=True)
class Receipt:
    """The digests of a run at a step, and the facts on which they may depend."""

    facts: Facts
    digests: Digests


def digests_of(arrays: Arrays) -> Digests:
    """Returns the digest of each weight and slot among a checkpoint's arrays, by key.

    A digest is the first 8 bytes of SHA-256, as 16 hexadecimal digits.
    """
    return {
        key: _digest(array)
        for key, array in arrays.items()
        if key.startswith(("model/", "optimizer/"))
    }


def _digest(array: np.ndarray | ShardedTable) -> str:
    # Faster than BLAKE2b if the processor has SHA instructions: 1.0 against 0.7 GB/s (2026-11-27).
    digest = hashlib.sha256()
    # In row order, so that a sharded table's digest does not depend on the number of ranks.
    pieces = array.pieces() if isinstance(array, ShardedTable) else [(None, array)]
    for _, piece in pieces:
        digest.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]


def read_receipts(folder: Path) -> dict[int, Receipt]:
    """Returns a run's receipts by step; for a step that was trained again, the newer one.

    Raises:
        StorageError: the run has no receipts, or their file is damaged.
    """
    path = folder / RECEIPTS_FILE
    if not is_own_file(path):
        raise StorageError(
            f"{path} is missing; choose a run that has written a checkpoint, and with it this file"
        )
    receipts: dict[int, Receipt] = {}
    facts: dict[str, Facts] = {}
    try:
        for line in _lines(path):
            if "step" in line:
                step = int(line["step"])
                receipts[step] = Receipt(facts[line["start"]], dict(line["digests"]))
                continue
            if "facts" in line:
                facts[line["start"]] = {
                    kind: dict(values) for kind, values in dict(line["facts"]).items()
                }
            # Steps after the one from which the run resumed were lost, and are trained again.
            first_step = int(line["first_step"])
            receipts = {step: receipt for step, receipt in receipts.items() if step <= first_step}
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise StorageError(
            f"{path} is damaged ({in_one_line(error)}); restore it or move it away"
        ) from error
    return dict(sorted(receipts.items()))


def _lines(path: Path) -> Lines:
    return [json.loads(line) for line in whole_lines(read_file(path)).splitlines()]


def _text(lines: Lines) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


class ReceiptWriter(Writer):
    """Writes checkpoints, and a receipt after each, in the same background thread (chief only).

    A failure to write a receipt only logs a warning.
    """

    def begin(self, first_step: int, make_facts: Callable[[], Facts]) -> None:
        """Sets the step from which this start continues, and the function that returns its facts."""
        self.first_step = first_step
        self.make_facts = make_facts
        self._start = ""
        self._lost: dict[int, Digests] = {}

    def _write(self, step: int, arrays: Arrays, meta: Meta) -> None:
        super()._write(step, arrays, meta)
        try:
            self._add(step, digests_of(arrays))
        except Exception as error:
            log.warning(
                "the receipt of step %s was not written: %s", f"{step:,}", in_one_line(error)
            )

    def _add(self, step: int, digests: Digests) -> None:
        path = self.folder.parent / RECEIPTS_FILE
        if not self._start:
            self._begin_file(path)
        receipt = {"step": step, "start": self._start, "digests": digests}
        if step in self._lost:
            # An earlier start had reached this step, but the run resumed from before it.
            receipt["repeated"] = "same bits" if self._lost[step] == digests else "different bits"
        append_text(path, _text([receipt]))
        if path.stat().st_size > MAX_BYTES:
            write_atomic(path, _text(thin_receipts(_lines(path))))

    def _begin_file(self, path: Path) -> None:
        """Adds the line of this start, drops an incomplete last line, and remembers the receipts of lost steps."""
        lines: Lines = []
        if path.exists():
            earlier = read_receipts(path.parent).items()
            self._lost = {
                step: receipt.digests for step, receipt in earlier if step > self.first_step
            }
            lines = _lines(path)
        facts = json.loads(json.dumps(self.make_facts(), default=str))
        start = _digest(np.frombuffer(json.dumps(facts, sort_keys=True).encode(), np.uint8))
        line = {"start": start, "first_step": self.first_step}
        if start not in {line["start"] for line in lines}:
            line["facts"] = facts
        write_atomic(path, _text([*lines, line]))
        self._start = start


def thin_receipts(lines: Lines) -> Lines:
    """Drops every second receipt of the older half; lines of starts are kept.

    >>> [line.get("step") for line in thin_receipts([{"start": "a"}, *({"step": step} for step in range(1, 9))])]
    [None, 2, 4, 5, 6, 7, 8]
    """
    receipts = [index for index, line in enumerate(lines) if "step" in line]
    dropped = set(receipts[: len(receipts) // 2 : 2])
    return [line for index, line in enumerate(lines) if index not in dropped]
