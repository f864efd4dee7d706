"""Goodput of a run: the share of its wall time, over all of its starts, that went into steps. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvtrain.system.text import duration

# What the time of rank 0 goes to. The steps are those that the newest checkpoint has or that follow it.
PARTS = ("steps", "data", "start", "checkpoints", "restarts")


@dataclass
class Goodput:
    """Seconds by PARTS. Moments are of time.time().

    Args:
        began: The beginning of the run's first start.
        start_began: The beginning of this start.
        seconds: So far, by part.
    """

    began: float
    start_began: float
    seconds: dict[str, float]

    @classmethod
    def resumed(cls, saved: Any, now: float) -> "Goodput":
        """Continues what a checkpoint has of record(); begins anew without.

        What has passed since the checkpoint was lost: steps that are repeated, and the time until this start.

        >>> Goodput.resumed(Goodput(0, 0, dict.fromkeys(PARTS, 1.0)).record(100), 130).seconds["restarts"]
        31.0
        """
        try:
            seconds = {part: float(saved["seconds"][part]) for part in PARTS}
            began = float(saved["began"])
            until = float(saved["until"])
            if not math.isfinite(sum(seconds.values(), began + until)):
                raise ValueError("a number that is not finite")
        except (TypeError, LookupError, ValueError):
            return cls(now, now, dict.fromkeys(PARTS, 0.0))
        # Ranks may also begin again within their processes, which began before the checkpoint.
        now = max(now, until)
        seconds["restarts"] += now - until
        return cls(began, now, seconds)

    def record(self, now: float) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {"began": self.began, "until": now, "seconds": dict(self.seconds)}

    def end_first_step(self, now: float) -> None:
        """Counts all up to the end of the first step, which traces the graph, as the start."""
        self.seconds["start"] += now - self.start_began

    def count_data(self, seconds: float) -> None:
        """Takes the wait for data out of the steps."""
        self.seconds["steps"] -= seconds
        self.seconds["data"] += seconds

    def summary(self, now: float) -> dict[str, float]:
        """Returns all seconds, the share of the steps, and the seconds by part, with the rest as "other".

        >>> Goodput(0, 0, dict.fromkeys(PARTS, 1.0)).summary(10)["other"]
        5.0
        """
        whole = max(now - self.began, 1e-9)
        other = max(0.0, whole - sum(self.seconds.values()))
        return {"share": self.seconds["steps"] / whole, "all": whole, **self.seconds, "other": other}


def in_words(summary: Mapping[str, float]) -> str:
    """A summary in one line, without parts of less than half a percent.

    >>> in_words({"share": 0.8, "all": 50.0, "steps": 40.0, "data": 0.0, "start": 8.0, "other": 2.0})
    '80% of 50 s went into steps; start 16%, other 4%'
    """
    rest = [name for name in (*PARTS[1:], "other") if summary.get(name, 0.0) >= 0.005 * summary["all"]]
    parts = ", ".join(f"{name} {summary[name] / summary['all']:.0%}" for name in rest)
    return f"{summary['share']:.0%} of {duration(summary['all'])} went into steps; {parts}".rstrip("; ")
