"""Predicts the time of a step on n ranks: computation, and the reduction that it does not hide.

Pure. This is a small simulation: the backward pass finishes the gradients of the last layer first;
those that are ready are fused into a buffer (Horovod's tensor fusion, arXiv:1802.05799); buffers
are all-reduced one after another; the step ends when the last one is reduced and all computation is
done.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from statistics import NormalDist

from hvtrain.plan.algorithms import Machine, allreduce_seconds

MIB = 1 << 20


@dataclass(frozen=True)
class Gradient:
    """A tensor to reduce.

    Attributes:
        num_bytes: Its size.
        work: Operations between the previous gradient and this one, in any unit.
        shape: The shape of its variable; empty for a message that holds several gradients.
    """

    num_bytes: int
    work: float
    shape: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Work:
    """A step on one rank alone.

    Attributes:
        step_seconds: Its duration.
        gradients: In the order of the backward pass.
        forward_share: Fraction of the step that precedes the backward pass. The default is 1/3:
            for each product of the forward pass, the backward pass computes two (the gradients of
            a layer's inputs and of its weights).
    """

    step_seconds: float
    gradients: Sequence[Gradient]
    forward_share: float = 1 / 3


@dataclass(frozen=True)
class Rules:
    """The rules by which ranks reduce gradients.

    The defaults of fusion_bytes and cycle_seconds are Horovod's since 0.21.

    Attributes:
        overlap: True if gradients are reduced while others are still being computed; False if the
            first reduction waits for the last gradient.
        fusion_bytes: Size of a buffer; a larger tensor is sent alone. It is 0 in hvtrain's runs,
            which send buckets instead.
        cycle_seconds: Interval at which Horovod looks for ready gradients; a gradient waits for
            half of it on average.
        interference: The fraction by which computation is slower while data moves, since both use
            memory and cores (Rashidi et al. 2021, "Enabling Compute-Communication Overlap in
            Distributed Deep Learning Training Platforms"). Fitted, like algorithms.LINK_SHARE and
            the deviation; see docs/plan.md.
        deviation: Standard deviation of the ranks' step times, relative to their mean.
        algorithms: Names in algorithms.ALGORITHMS; the fastest is used for each buffer. The
            defaults are the two that NCCL chooses from.
    """

    overlap: bool = False
    fusion_bytes: int = 128 * MIB
    cycle_seconds: float = 1e-3
    interference: float = 0.15
    deviation: float = 0.025
    algorithms: tuple[str, ...] = ("ring", "tree")


@dataclass(frozen=True)
class Cost:
    """The predicted cost of a step on num_ranks ranks.

    Attributes:
        num_ranks: Number of ranks.
        step_seconds: Time of the whole step.
        compute_seconds: Computation time of the slowest rank, without the reduction.
        communication_seconds: Time of all reductions, hidden or not.
        exposed_seconds: Time that the reduction adds to the step, interference included.
        num_buffers: Number of reductions.
        algorithm: The algorithm for the largest buffer.
        efficiency: One rank's step time divided by step_seconds.
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
    """Simulates a step on num_ranks ranks and returns its cost.

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
    compute_seconds = work.step_seconds * slowdown(num_ranks, rules.deviation)
    # A single rank reduces nothing.
    gradients = work.gradients if num_ranks > 1 else []
    sizes = [gradient.num_bytes for gradient in gradients]
    ready = [compute_seconds] * len(sizes)
    if rules.overlap:
        ready = _ready_times(work, compute_seconds)

    computed_at = compute_seconds
    # The end of the latest reduction, and the total time of all reductions.
    reduced_at = 0.0
    communication_seconds = 0.0
    buffers = []
    first = 0
    while first < len(sizes):
        # After a reduction, Horovod immediately starts the next one that is ready; when idle, it
        # waits for its next cycle.
        begin = reduced_at
        if ready[first] >= reduced_at:
            begin = ready[first] + rules.cycle_seconds / 2

        # Gradients that are ready by then share the buffer.
        end = first + 1
        while (
            end < len(sizes)
            and ready[end] <= begin
            and sum(sizes[first : end + 1]) <= rules.fusion_bytes
        ):
            end += 1

        num_bytes = sum(sizes[first:end])
        seconds, algorithm = allreduce_seconds(num_bytes, num_ranks, machine, rules.algorithms)

        # Computation is slowed down only while data moves, not during the latency.
        latency_seconds, _ = allreduce_seconds(0, num_ranks, machine, (algorithm,))
        transfer_seconds = max(0.0, seconds - latency_seconds)
        ready = [_delay(moment, begin, transfer_seconds, rules.interference) for moment in ready]
        computed_at = _delay(computed_at, begin, transfer_seconds, rules.interference)
        buffers.append((num_bytes, algorithm))
        communication_seconds += seconds
        reduced_at = begin + seconds
        first = end

    # The step ends when both the computation and the last reduction are done.
    step_seconds = max(computed_at, reduced_at)
    return Cost(
        num_ranks=num_ranks,
        step_seconds=step_seconds,
        compute_seconds=compute_seconds,
        communication_seconds=communication_seconds,
        exposed_seconds=step_seconds - compute_seconds,
        num_buffers=len(buffers),
        algorithm=max(buffers, default=(0, "none"))[1],
        efficiency=work.step_seconds / step_seconds,
    )


def _ready_times(work: Work, compute_seconds: float) -> list[float]:
    """Returns the time at which each gradient is ready, in proportion to the operations up to it.

    >>> _ready_times(Work(0.3, [Gradient(4, 1.0), Gradient(4, 3.0)], forward_share=0.5), 0.4)
    [0.25, 0.4]
    """
    done = list(accumulate(gradient.work for gradient in work.gradients))
    # If no gradient has any work, all are ready at the end.
    shares = [operations / done[-1] if done[-1] else 1.0 for operations in done]
    return [
        compute_seconds * (work.forward_share + (1 - work.forward_share) * share)
        for share in shares
    ]


def _delay(moment: float, begin: float, seconds: float, interference: float) -> float:
    """Returns the time at which work due at `moment` ends if computation is slower for `seconds` from `begin` on.

    >>> _delay(1.0, 2.0, 1.0, 0.2), _delay(10.0, 2.0, 1.0, 0.2), round(_delay(2.4, 2.0, 1.0, 0.2), 6)
    (1.0, 10.2, 2.5)
    """
    if moment <= begin:
        return moment
    # The slowdown ends when the data have arrived or the work is done, whichever comes first.
    # Slowed down, work of duration t takes t / (1 - interference).
    return moment + min(
        seconds * interference, (moment - begin) * interference / (1 - interference)
    )


@cache
def expected_maximum(count: int) -> float:
    """Returns the expected maximum of `count` independent standard normal variables.

    Integrates the maximum's distribution function by the midpoint rule. The result grows like
    sqrt(2 ln n) (David and Nagaraja 2003, "Order Statistics", chapter 3).

    >>> [round(expected_maximum(count), 4) for count in (1, 2, 10, 100)]  # 2: 1 / sqrt(pi)
    [0.0, 0.5642, 1.5388, 2.5076]
    """
    end = 8.0  # Values beyond 8 standard deviations are negligible.
    steps = 800
    width = 2 * end / steps
    below = [NormalDist().cdf(-end + width * (index + 0.5)) ** count for index in range(steps)]
    return end - width * sum(below)


def slowdown(num_ranks: int, deviation: float) -> float:
    """Returns the expected step time of the slowest of num_ranks ranks, relative to the mean.

    All ranks wait for the slowest. Step times are assumed to be normally distributed, with this
    relative deviation. The heavier tail that Chen et al. (2016, "Revisiting Distributed Synchronous
    SGD", arXiv:1604.00981) measured on real clusters is not modeled.

    >>> round(slowdown(512, 0.03), 3)
    1.091
    """
    return 1 + deviation * expected_maximum(num_ranks)


def rank_counts(num_ranks: int) -> list[int]:
    """Returns the numbers of ranks for which a forecast shows costs: powers of two, and num_ranks.

    >>> rank_counts(12), rank_counts(8)
    ([1, 2, 4, 8, 12], [1, 2, 4, 8])
    """
    smaller_powers = [1 << power for power in range((num_ranks - 1).bit_length())]
    return [*smaller_powers, num_ranks]
