"""A rank's verdict on a failure: one line of JSON on the error output, which a launcher reads and does not show."""

import json
import os
from dataclasses import asdict, dataclass

PREFIX = "hvtrain-verdict: "
UNSAVED = "before training began, so nothing was saved"
# Every process of a launch that hvtrain watches has this variable (launch/on_host.py calls it MARK).
_WATCHED = "HVTRAIN_LAUNCH"


@dataclass(frozen=True)
class Verdict:
    """The rank at fault (HOST[SLOT] in an elastic job; None: nobody knows), why, and its exit code if known."""

    rank: int | str | None
    cause: str = ""
    code: int | None = None

    def line(self) -> str:
        """The line to write; empty where no launcher would read and hide it."""
        return f"{PREFIX}{json.dumps(asdict(self))}\n" if _WATCHED in os.environ else ""


def read(line: str) -> Verdict | None:
    """The verdict of a line; None for any other line."""
    if not line.startswith(PREFIX):
        return None
    try:
        return Verdict(**json.loads(line.removeprefix(PREFIX)))
    except (TypeError, ValueError):
        return None
