"""The conclusions of a comparison, in words. Pure."""

from collections.abc import Mapping, Sequence
from statistics import median

from hvtrain.compare.contestants import SINGLE
from hvtrain.compare.rounds import Ratio, ratio

FEWEST_ROUNDS = 3
Speeds = Mapping[str, Mapping[int, float]]  # examples/s by contestant and round


def against(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[Ratio, int] | None:
    """The ratio of two speeds over the rounds that both have, and their number; None if there is none.

    >>> against({1: 3.0, 2: 5.0}, {1: 2.0})
    (Ratio(median=1.5, low=1.5, high=1.5, coverage=0.0), 1)
    """
    both = sorted(ours.keys() & theirs.keys())
    found = ratio([ours[one] for one in both], [theirs[one] for one in both]) if both else None
    return (found, len(both)) if found else None


def in_words(found: Ratio, rounds: int) -> str:
    """A ratio with its interval.

    >>> in_words(Ratio(1.344, 1.2, 1.41, 0.969), 6)
    '1.34 times (1.20 to 1.41 with 97% confidence)'
    >>> in_words(Ratio(1.344, 1.2, 1.41, 0.5), 2)
    '1.34 times (2 rounds, too few for a confidence)'
    """
    if rounds < FEWEST_ROUNDS:
        return f"{found.median:.2f} times ({rounds} round{'s' * (rounds > 1)}, too few for a confidence)"
    return f"{found.median:.2f} times ({found.low:.2f} to {found.high:.2f} with {found.coverage:.0%} confidence)"


def is_clear(found: Ratio, rounds: int) -> bool:
    """True if there are enough rounds, and 1 is outside the interval."""
    return rounds >= FEWEST_ROUNDS and not found.low <= 1 <= found.high


def on_speed(speeds: Speeds) -> list[str]:
    """Which contestant is the fastest, and how the others compare with it."""
    middle = {name: median(rounds.values()) for name, rounds in speeds.items() if rounds}
    if len(middle) < 2:
        return ["Fewer than two strategies were timed, so nothing can be compared."]
    first, *others = sorted(middle, key=lambda name: -middle[name])
    groups: dict[str, list[str]] = {"Not distinguishable from it": [], "Too few rounds to say": [], "Slower": []}
    for name in others:
        if found := against(speeds[name], speeds[first]):
            clear = is_clear(*found) and found[0].high < 1
            kind = "Too few rounds to say" if found[1] < FEWEST_ROUNDS else "Not distinguishable from it"
            groups["Slower" if clear else kind].append(f"{name} {in_words(*found)}")
    is_first = not any(groups[kind] for kind in groups if kind != "Slower")
    lines = [f"{'Fastest' if is_first else 'Most examples/s'} here: {first}, with {middle[first]:,.0f} examples/s."]
    return [*lines, *(f"{kind}: {'; '.join(found)} as fast as {first}." for kind, found in groups.items() if found)]


def on_scaling(speeds: Speeds, num_ranks: int) -> list[str]:
    """Whether num_ranks ranks are worth it: each contestant against one process."""
    lines = []
    for name in speeds:
        if name == SINGLE or not (found := against(speeds[name], speeds.get(SINGLE, {}))):
            continue
        words = f"{in_words(*found)} as fast as one process"
        if found[1] < FEWEST_ROUNDS:
            lines.append(f"{name} on {num_ranks} ranks: {words}; whether it pays is open.")
        elif not is_clear(*found):
            lines.append(f"{name} on {num_ranks} ranks: {words}; not distinguishable from it.")
        elif found[0].low > 1:
            efficiency = found[0].median / num_ranks
            lines.append(f"{name} pays here on {num_ranks} ranks: {words}, an efficiency of {efficiency:.0%}.")
        else:
            lines.append(f"{name} does not pay on {num_ranks} ranks here: {words}.")
    return lines


def on_target(metric: str, value: float, reached: Mapping[str, tuple[int, float] | None]) -> str:
    """When each contestant reached the target: its epoch, and seconds of training.

    >>> on_target("val_accuracy", 0.97, {"single": (3, 12.5), "horovod": (2, 8.0), "mirrored": None})
    'val_accuracy 0.97: horovod after 8.0 s (epoch 2), single after 12.5 s (epoch 3); not reached: mirrored.'
    """
    there = sorted((at[1], name, at[0]) for name, at in reached.items() if at)
    words = ", ".join(f"{name} after {seconds:.1f} s (epoch {epoch})" for seconds, name, epoch in there)
    missing = [name for name, at in reached.items() if not at]
    return f"{metric} {value:.4g}: {words or 'no strategy'}{f'; not reached: {_listed(missing)}' if missing else ''}."


def on_test(name: str, values: Mapping[str, float]) -> str:
    """The spread of the final test metric.

    >>> on_test("test_accuracy", {"single": 0.9722, "horovod": 0.975})
    'test_accuracy from 0.9722 (single) to 0.9750 (horovod); one run each, so another seed may order them otherwise.'
    """
    low, high = min(values, key=lambda one: values[one]), max(values, key=lambda one: values[one])
    text = f"{name} from {values[low]:.4f} ({low}) to {values[high]:.4f} ({high})"
    return f"{text}; one run each, so another seed may order them otherwise."


def on_examples(examples: Mapping[str, int]) -> list[str]:
    """A warning if the whole runs trained on different numbers of examples, beyond what does not fill a batch.

    >>> on_examples({"single": 1000, "horovod": 990}), on_examples({"single": 1000, "horovod": 2000})
    ([], ['Not the same training: not the same number of examples (single 1,000, horovod 2,000); give train.epochs.'])
    """
    if not examples or max(examples.values()) <= 1.1 * min(examples.values()):
        return []
    listed = _listed([f"{name} {number:,}" for name, number in examples.items()])
    return [f"Not the same training: not the same number of examples ({listed}); give train.epochs."]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
