"""A learning rate from the losses of a range test. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SMOOTHING = 0.9
"""Decay of the moving average per step."""
DIVERGED = 4.0
"""The test ends when the smoothed loss exceeds its lowest value by this factor."""
LEFT_OUT = 5
"""Number of first steps to leave out, in which the moving average has seen too little."""


@dataclass(frozen=True)
class Suggestion:
    """rate: where the smoothed loss falls fastest over the logarithm of the rate; lowest_at: where it is lowest.

    Both None if it never falls.
    """

    rate: float | None
    lowest_at: float | None


def smoothed(losses: Sequence[float]) -> list[float]:
    """The moving average, corrected for its start at zero.

    >>> smoothed([2.0, 2.0, 2.0])
    [2.0, 2.0, 2.0]
    """
    mean, result = 0.0, []
    for number, loss in enumerate(losses, start=1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        result.append(round(mean / (1 - SMOOTHING**number), 12))
    return result


def has_diverged(losses: Sequence[float]) -> bool:
    """True if the last loss is not finite, or the moving average is DIVERGED times its lowest value."""
    if not losses or not math.isfinite(losses[-1]):
        return bool(losses)
    line = smoothed(losses)
    return len(line) > LEFT_OUT and line[-1] > DIVERGED * min(line)


def suggest(rates: Sequence[float], losses: Sequence[float]) -> Suggestion:
    """The suggestion of a test with these losses at these rates, in the order of the steps.

    >>> rates = [10 ** (step / 10 - 5) for step in range(60)]
    >>> losses = [2.0 - 1.5 / (1 + math.exp(-6 * (math.log10(rate) + 2))) for rate in rates]
    >>> 0.01 < suggest(rates, losses).rate < 0.04
    True
    """
    number = next((n for n, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    line = smoothed(losses[:number])
    if len(line) <= LEFT_OUT + 2:
        return Suggestion(None, None)
    end = min(range(LEFT_OUT, len(line)), key=line.__getitem__)
    slopes = {
        step: (line[step + 1] - line[step - 1]) / math.log(rates[step + 1] / rates[step - 1])
        for step in range(LEFT_OUT, min(end + 1, len(line) - 1))
    }
    steepest = min(slopes, key=slopes.__getitem__, default=None)
    if steepest is None or slopes[steepest] >= 0:
        return Suggestion(None, None)
    return Suggestion(rates[steepest], rates[end])
