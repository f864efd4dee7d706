"""Time of one training step on n ranks: computing, and the reduction that it does not hide. Pure.

A small simulation: the backward pass finishes the gradients of the last layer first; those that are
ready go into a buffer (Horovod's tensor fusion, arXiv:1802.05799); buffers are all-reduced one after
the other; the step ends when the last is reduced and all computing is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from statistics import NormalDist

from hvtrain.plan.algorithms import Machine, allreduce_seconds

MIB = 1 << 20


@dataclass(frozen=True)
class Gradient:
    """A tensor to reduce, and the operations of its layer, in any unit, after which it is ready."""

    num_bytes: int
    work: float
    # The shape of one variable; empty for a message of several.
    shape: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Work:
    """One rank's step.

    Attributes:
        step_seconds: Its time without other ranks.
        gradients: In the order of the backward pass.
        forward_share: The part of the step before the first gradient. The backward pass computes
            twice as many products as the forward pass: for the inputs and for the weights.
    """

    step_seconds: float
    gradients: Sequence[Gradient]
    forward_share: float = 1 / 3


@dataclass(frozen=True)
class Rules:
    """The way in which ranks reduce.

    The defaults of fusion_bytes and cycle_seconds are Horovod's since 0.21.

    Attributes:
        overlap: True if gradients are reduced while others are computed, False if after the last.
        fusion_bytes: Size of a buffer; a larger tensor goes alone. hvtrain's runs fuse nothing (0),
            but have buckets.
        cycle_seconds: Interval at which Horovod looks for ready gradients, which wait half of it on
            average.
        interference: How much slower computing is while data is moved: both use memory and cores
            (Rashidi et al. 2021, "Enabling Compute-Communication Overlap in Distributed Deep
            Learning Training Platforms"). Fitted, as are algorithms.LINK_SHARE and the deviation:
            see docs/plan.md.
        deviation: Standard deviation of the ranks' step times, relative to their mean.
        algorithms: Names in algorithms.ALGORITHMS; each buffer takes the fastest. NCCL chooses
            between the default two.
    """

    overlap: bool = False
    fusion_bytes: int = 128 * MIB
    cycle_seconds: float = 1e-3
    interference: float = 0.15
    deviation: float = 0.025
    algorithms: tuple[str, ...] = ("ring", "tree")


@dataclass(frozen=True)
class Cost:
    """A step on num_ranks ranks.

    Attributes:
        compute_seconds: Time of the slowest rank, without the reduction.
        communication_seconds: Time of all reductions, hidden or not.
        exposed_seconds: Time that the reduction adds to the step, interference included.
        algorithm: The algorithm of the largest buffer.
        efficiency: One rank's step time / this one.
    """

    num_ranks: int
    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    num_buffers: int
    algorithm: str
    efficiency: float


def step_cost(work: Work, num_ranks: int, machine: Machine, rules: Rules) -> Cost:
    """Simulates the step on num_ranks ranks.

    >>> from hvtrain.plan.algorithms import Link
    >>> work = Work(0.3, [Gradient(50_000_000, 1.0), Gradient(50_000_000, 1.0)])
    >>> machine = Machine(Link(0.0, 1e9), Link(0.0, 1e9), ranks_per_host=1)
    >>> rules = Rules(cycle_seconds=0, interference=0, deviation=0, fusion_bytes=1)
    >>> cost = step_cost(work, 2, machine, rules)  # 0.3 s, then twice 50 MB at 1 GB/s
    >>> round(cost.step_seconds, 3), cost.num_buffers, round(cost.efficiency, 3)
    (0.4, 2, 0.75)
    >>> from dataclasses import replace
    >>> round(step_cost(work, 2, machine, replace(rules, overlap=True)).step_seconds, 3)  # the first begins at 0.2 s
    0.35
    """
    # All ranks wait for the slowest one.
    compute = work.step_seconds * slowdown(num_ranks, rules.deviation)
    if num_ranks == 1 or not work.gradients:
        return Cost(num_ranks, compute, compute, 0.0, 0.0, 0, "none", work.step_seconds / compute)

    sizes = [gradient.num_bytes for gradient in work.gradients]
    ready = _ready_times(work, compute) if rules.overlap else [compute] * len(sizes)

    computed = compute
    free = 0.0  # When the last reduction so far has ended.

    # Time of all reductions, whether they are hidden or not.
    busy = 0.0
    buffers: list[tuple[int, str]] = []
    first = 0
    while first < len(sizes):
        # After a reduction Horovod takes the next at once; while idle it waits for its next cycle.
        begin = free
        if ready[first] >= free:
            begin = ready[first] + rules.cycle_seconds / 2

        # Gradients that are ready by now share the buffer.
        last = first + 1
        while (
            last < len(sizes)
            and ready[last] <= begin
            and sum(sizes[first : last + 1]) <= rules.fusion_bytes
        ):
            last += 1

        num_bytes = sum(sizes[first:last])
        seconds, algorithm = allreduce_seconds(num_bytes, num_ranks, machine, rules.algorithms)

        # Computing is slower only while data moves, not during the latency.
        moving = max(0.0, seconds - allreduce_seconds(0, num_ranks, machine, (algorithm,))[0])
        ready = [_held_up(moment, begin, moving, rules.interference) for moment in ready]
        computed = _held_up(computed, begin, moving, rules.interference)
        # The algorithm of the largest buffer stands for the step.
        buffers.append((num_bytes, algorithm))
        busy += seconds
        free = begin + seconds
        first = last

    # Whichever ends last: the computing or the reduction.
    step = max(computed, free)
    return Cost(
        num_ranks=num_ranks,
        step_seconds=step,
        compute_seconds=compute,
        communication_seconds=busy,
        exposed_seconds=step - compute,
        num_buffers=len(buffers),
        algorithm=max(buffers)[1],
        efficiency=work.step_seconds / step,
    )


def _ready_times(work: Work, compute_seconds: float) -> list[float]:
    """The time at which each gradient is ready, in proportion to the operations so far.

    >>> _ready_times(Work(0.3, [Gradient(4, 1.0), Gradient(4, 3.0)], forward_share=0.5), 0.4)
    [0.25, 0.4]
    """
    done = list(accumulate(gradient.work for gradient in work.gradients))
    total = done[-1]
    # Without weights in any layer there is no work to share.
    shares = [operations / total if total else 1.0 for operations in done]
    return [
        compute_seconds * (work.forward_share + (1 - work.forward_share) * share)
        for share in shares
    ]


def _held_up(moment: float, begin: float, seconds: float, interference: float) -> float:
    """The time at which work due at `moment` is done, if computing is slower for `seconds` from `begin` on.

    >>> _held_up(1.0, 2.0, 1.0, 0.2), _held_up(10.0, 2.0, 1.0, 0.2), round(_held_up(2.4, 2.0, 1.0, 0.2), 6)
    (1.0, 10.2, 2.5)
    """
    if moment <= begin or not interference:
        return moment
    # Slower for as long as data is moved, or until the work is done if that comes first.
    return moment + min(
        seconds * interference, (moment - begin) * interference / (1 - interference)
    )


@lru_cache(maxsize=1024)
def expected_maximum(number: int) -> float:
    """Expected maximum of independent standard normal numbers, by the midpoint rule over its distribution.

    It grows like sqrt(2 ln n) (David and Nagaraja 2003, "Order Statistics", chapter 3).

    >>> [round(expected_maximum(number), 4) for number in (1, 2, 10, 100)]  # 2: 1 / sqrt(pi)
    [0.0, 0.5642, 1.5388, 2.5076]
    """
    end = 8.0  # Normal numbers beyond 8 deviations are negligible.
    steps = 800
    width = 2 * end / steps
    below = [NormalDist().cdf(-end + width * (index + 0.5)) ** number for index in range(steps)]
    return end - width * sum(below)


def slowdown(num_ranks: int, deviation: float) -> float:
    """Expected step time of the slowest of num_ranks ranks, for which all wait, relative to the mean.

    Step times are assumed to be normal, with a relative deviation. The heavier tail that Chen et al.
    (2016, "Revisiting Distributed Synchronous SGD", arXiv:1604.00981) measured on real clusters is
    not modeled.

    >>> round(slowdown(512, 0.03), 3)
    1.091
    """
    return 1 + deviation * expected_maximum(num_ranks)


def rank_counts(num_ranks: int) -> list[int]:
    """The numbers of ranks that a forecast shows.

    >>> rank_counts(12), rank_counts(8)
    ([1, 2, 4, 8, 12], [1, 2, 4, 8])
    """
    powers = [1 << power for power in range(num_ranks.bit_length())]
    return [*(power for power in powers if power < num_ranks), num_ranks]
