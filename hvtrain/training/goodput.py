"""Goodput of a run: the share of its wall-clock time, over all its starts, that went into steps. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvtrain.system.text import duration

# How rank 0's time is divided. "steps" counts each step of the run once; the time of steps that
# a restart lost, and that run again, is "repeated".
PARTS = ("steps", "data", "start", "checkpoints", "repeated", "restarts")


@dataclass
class Goodput:
    """Seconds of a run, divided into PARTS. Points in time are values of time.time().

    Args:
        began: When the run first started.
        start_began: When this start began.
        seconds: Seconds so far, by part.
    """

    began: float
    start_began: float
    seconds: dict[str, float]

    @classmethod
    def resumed(cls, saved: Any, now: float, last_step_at: float = 0.0) -> "Goodput":
        """Continues from a checkpoint's record(); without a valid one, starts from zero.

        The time since the checkpoint was lost. Up to last_step_at it counts as "repeated", because
        those steps run again; from then to this start it counts as "restarts".

        Args:
            saved: What record() returned, as read from the checkpoint.
            now: When this start began.
            last_step_at: When the last step before this start ended; 0 if unknown.

        >>> resumed = Goodput.resumed(Goodput(0, 0, dict.fromkeys(PARTS, 1.0)).record(100), 130, 112)
        >>> resumed.seconds["repeated"], resumed.seconds["restarts"]
        (13.0, 19.0)
        """
        try:
            seconds = {part: float(saved["seconds"][part]) for part in PARTS}
            began = float(saved["began"])
            until = float(saved["until"])
            if not math.isfinite(sum(seconds.values(), began + until)):
                raise ValueError("a number that is not finite")
        except (TypeError, LookupError, ValueError):
            return cls(now, now, dict.fromkeys(PARTS, 0.0))
        # Elastic ranks restart within their processes, so this start may
        # have begun before the checkpoint.
        now = max(now, until)
        if last_step_at > now:
            # It is a file's modification time, and is this late if this start copied the file here.
            last_step_at = 0.0
        ended = max(until, last_step_at)
        seconds["repeated"] += ended - until
        seconds["restarts"] += now - ended
        return cls(began, now, seconds)

    def record(self, now: float) -> dict[str, Any]:
        """Returns the state to save in a checkpoint."""
        return {"began": self.began, "until": now, "seconds": dict(self.seconds)}

    def summary(self, now: float) -> dict[str, float]:
        """Returns the total seconds ("all"), the "share" of the steps, and the seconds by part; "other" is the rest.

        >>> Goodput(0, 0, dict.fromkeys(PARTS, 1.0)).summary(10)["other"]
        4.0
        """
        whole = max(now - self.began, 1e-9)
        return {
            "share": self.seconds["steps"] / whole,
            "all": whole,
            **self.seconds,
            "other": max(0.0, whole - sum(self.seconds.values())),
        }


def in_words(summary: Mapping[str, float]) -> str:
    """Formats a summary() in one line, leaving out parts below half a percent.

    >>> seconds = dict.fromkeys(PARTS, 0.0) | {"steps": 40.0, "start": 8.0}
    >>> in_words(Goodput(0.0, 0.0, seconds).summary(50.0))
    '80% of 50 s went into steps; start 16%, other 4%'
    """
    parts = ", ".join(
        f"{name} {summary[name] / summary['all']:.0%}"
        for name in (*PARTS[1:], "other")
        if summary[name] >= 0.005 * summary["all"]
    )
    return f"{summary['share']:.0%} of {duration(summary['all'])} went into steps; {parts}".rstrip(
        "; "
    )
