"""Compares, by time, bytes and memory, the settings that help on a slow network (`plan --advise`).

`python -m hvtrain.plan.methods` measures the time of compression on this host, in a separate process
so that a plan itself does not start Horovod.
"""

import json
import os
import subprocess
import sys
import timeit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from hvtrain.config.schema import RunConfig
from hvtrain.errors import LostRankError
from hvtrain.launch.child import failure
from hvtrain.plan.algorithms import Machine, allreduce_seconds
from hvtrain.plan.step_cost import Cost, Gradient, Rules, Work, step_cost

if TYPE_CHECKING:
    from hvtrain.models.memory import Footprint

REPETITIONS = 5
# A method must speed up a step by at least this factor to be worth its effect on the training.
MIN_SPEEDUP = 1.1
# The kind of exchange for each compression; see Machine.exchanges.
KINDS = {"fp16": "half", "bf16": "gather", "int8": "gather"}

# The bytes of the float32 gradients in one piece of a message; a piece has wire_formats.PIECE_BLOCKS blocks.
PIECE_BYTES = 4096 * 1024 * 4

# The compression, and PowerSGD's rank.
Wire = tuple[str, int]


@dataclass(frozen=True)
class Method:
    """A way in which ranks exchange gradients or weights.

    Attributes:
        settings: The settings that choose it.
        effect: Its effect on the result, for the table.
        compression, rank, every, within_hosts, shard_optimizer: As in the strategy's settings.
        has_outer: True if an outer optimizer with momentum applies the ranks' changes, as in DiLoCo.
    """

    settings: str
    effect: str = ""
    compression: str = "none"
    rank: int = 4
    every: int = 1
    within_hosts: bool = False
    shard_optimizer: bool = False
    has_outer: bool = False

    @property
    def wire(self) -> Wire:
        return self.compression, self.rank

    @property
    def keeps_errors(self) -> bool:
        """True if each rank keeps its compression error, as in WireFormat.keeps_errors."""
        return self.compression in ("int8", "powersgd")

    def fits(self, config: RunConfig) -> bool:
        """True if a run with these settings can use the method (docs/networks.md)."""
        if config.train.precision == "mixed_float16":
            return self.every == 1 and not self.keeps_errors
        return self.every == 1 or config.train.accumulate == 1

    def extra_bytes(self, footprint: "Footprint", num_ranks: int) -> dict[str, int]:
        """Returns the bytes of memory that the method adds to a rank, by purpose; negative if it saves memory."""
        parts = {}
        if self.keeps_errors:
            parts["errors"] = footprint.gradient_bytes
        if self.has_outer:
            parts["anchors and outer momentum"] = 2 * footprint.gradient_bytes
        if self.shard_optimizer:
            sharded = footprint.slot_bytes - footprint.whole_slot_bytes
            parts["optimizer slots"] = sharded // num_ranks - sharded
        return parts

    def rank_bytes(self, footprint: "Footprint") -> int:
        """Returns the bytes of a rank's own state in a checkpoint: its errors and, with local steps, its slots."""
        errors = footprint.gradient_bytes if self.keeps_errors else 0
        return errors + (footprint.slot_bytes if self.every > 1 else 0)


# Ordered by effect on the result, the mildest first: of about equally fast methods, the first is advised.
# Sharding is last, since it saves memory, not time.
METHODS = (
    Method("strategy=horovod", "uncompressed gradients"),
    Method("strategy.compression=fp16", "half precision, with its range", "fp16"),
    Method("strategy.compression=bf16", "8 significant bits", "bf16"),
    Method("strategy.compression=int8", "8 bits, with error feedback", "int8"),
    Method("strategy.compression=powersgd", "rank 4, with error feedback", "powersgd"),
    Method("strategy=local_sgd strategy.every=16", "ranks drift apart for 16 steps", every=16),
    Method(
        "strategy=diloco strategy.every=500",
        "ranks drift apart for 500 steps; for long runs",
        every=500,
        has_outer=True,
    ),
    Method(
        "strategy.shard_optimizer=true", "the same weights, with less memory", shard_optimizer=True
    ),
)


def method_of(strategy: Mapping[str, Any]) -> Method:
    """Returns the method that a run's settings choose."""
    names = ("compression", "rank", "every", "within_hosts", "shard_optimizer")
    settings = {name: strategy[name] for name in names if name in strategy}
    return Method("as set", has_outer="outer_rate" in strategy, **settings)


@dataclass(frozen=True)
class CompressionCost:
    """The cost of one compression.

    Attributes:
        seconds: Time of compression in a step.
        message_bytes: For each message, the bytes of an uncompressed message whose ring all-reduce sends as much.
    """

    seconds: float
    message_bytes: Sequence[float]


def measure_compression(
    shapes: Sequence[Any], methods: Sequence[Method], num_threads: int
) -> dict[Wire, CompressionCost]:
    """Returns the cost of each method's compression, by wire, as measured on one rank of this host.

    Args:
        shapes: The shapes of the gradients in each message.
        methods: The methods; those without compression are left out.
        num_threads: TensorFlow's threads for a rank.

    Raises:
        LostRankError: The measuring process failed.
    """
    wires = list(dict.fromkeys(method.wire for method in methods if method.compression != "none"))
    if not wires:
        return {}

    threads = {"TF_NUM_INTRAOP_THREADS": str(num_threads), "TF_CPP_MIN_LOG_LEVEL": "2"}
    result = subprocess.run(
        [sys.executable, "-m", "hvtrain.plan.methods"],
        input=json.dumps([wires, shapes]),
        env={**os.environ, **threads},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise LostRankError(
            f"the time of compression could not be measured: {failure(result.stderr, result.returncode)}"
        )
    # Libraries may print something before the answer.
    answers = json.loads(result.stdout.splitlines()[-1])
    return {wire: CompressionCost(*answer) for wire, answer in zip(wires, answers)}


def method_cost(
    method: Method,
    work: Work,
    compression_costs: Mapping[Wire, CompressionCost],
    num_ranks: int,
    machine: Machine,
    rules: Rules,
    accumulate: int = 1,
) -> Cost:
    """Predicts the cost of a step with this method, as the mean over the steps between two reductions.

    Args:
        method: The method.
        work: One rank's step, with the messages that are reduced without compression.
        compression_costs: The result of `measure_compression`.
        num_ranks: Number of ranks.
        machine: The machine.
        rules: How the ranks reduce gradients.
        accumulate: Steps whose gradients are averaged before they are reduced.
    """
    every = method.every * accumulate
    compression = compression_costs.get(method.wire)
    compressed = work
    if compression and num_ranks > 1:
        kind = KINDS.get(method.compression, "")
        # Two ranks swap their bytes in pieces; see ByteFormat.
        swaps = num_ranks == 2 and kind == "gather"
        machine = machine.exchanges.get("bytes" if swaps else kind, machine)
        compressed = _compressed_work(work, compression, every, swaps)

    # PowerSGD's second matrix is computed from the mean of the first, after the rest of the backward
    # pass, so little of its messages is hidden.
    hides_messages = rules.overlap and every == 1 and method.compression != "powersgd"
    # Ranks that synchronize every k steps wait for the slowest sum of k step times, whose relative
    # deviation is smaller by a factor of sqrt(k).
    rules = replace(rules, overlap=hides_messages, deviation=rules.deviation / every**0.5)
    cost = step_cost(compressed, num_ranks, machine, rules)
    gather_seconds = 0.0
    if method.shard_optimizer:
        # After the update the ranks gather the weights, which is the
        # second half of a ring all-reduce.
        num_bytes = sum(gradient.num_bytes for gradient in work.gradients)
        seconds, _ = allreduce_seconds(
            num_bytes, num_ranks, machine.exchanges.get("gather", machine), rules.algorithms
        )
        gather_seconds = seconds / 2
    exposed = (cost.exposed_seconds + gather_seconds) / every
    if method.within_hosts:
        # The ranks of a host also average their gradients before every local update.
        on_host = step_cost(work, min(num_ranks, machine.ranks_per_host), machine, rules)
        exposed += on_host.exposed_seconds / accumulate
    step_seconds = cost.compute_seconds + exposed
    return replace(
        cost,
        step_seconds=step_seconds,
        communication_seconds=(cost.communication_seconds + gather_seconds) / every,
        exposed_seconds=exposed,
        efficiency=work.step_seconds / step_seconds,
    )


def _compressed_work(work: Work, compression: CompressionCost, every: int, swaps: bool) -> Work:
    """Returns a rank's mean step if one step in `every` compresses its messages.

    Args:
        work: The step without compression.
        compression: The cost of compression.
        every: Steps from one reduction to the next.
        swaps: True if ranks swap each message in pieces, each of PIECE_BYTES when uncompressed.
    """
    messages = []
    for num_bytes, message in zip(compression.message_bytes, work.gradients):
        num_pieces = max(1, message.num_bytes // PIECE_BYTES) if swaps else 1
        piece = Gradient(round(num_bytes / num_pieces), message.work / num_pieces)
        messages += [piece] * num_pieces
    step_seconds = work.step_seconds + compression.seconds / every
    # Compression counts as part of the backward pass, so the forward pass
    # is a smaller share of the step.
    return Work(step_seconds, messages, work.forward_share * work.step_seconds / step_seconds)


def sent_bytes(
    method: Method,
    work: Work,
    compression_costs: Mapping[Wire, CompressionCost],
    num_ranks: int,
    accumulate: int = 1,
) -> float:
    """Returns the bytes that a rank sends in a step, as the mean over the steps between two reductions."""
    sizes: Sequence[float] = [gradient.num_bytes for gradient in work.gradients]
    if method.wire in compression_costs:
        sizes = compression_costs[method.wire].message_bytes
    # Gathering the weights sends half as much as an all-reduce of them.
    factor = 1.5 if method.shard_optimizer else 1.0
    return factor * sum(sizes) * 2 * (num_ranks - 1) / num_ranks / (method.every * accumulate)


def advice(costs: Mapping[Method, Cost]) -> str:
    """Returns one sentence that advises which of METHODS to take, or says that none pays off.

    Args:
        costs: The cost of each method that fits the run.

    >>> def costs_of(*seconds):
    ...     costs = [Cost(2, step, 0.2, 0, step - 0.2, 1, "ring", 0.2 / step) for step in seconds]
    ...     return dict(zip(METHODS, costs))
    >>> advice(costs_of(1.0, 0.7, 0.9, 0.68, 0.9, 0.3, 0.2, 1.3)).split("; ")[0]
    'take strategy.compression=fp16, 1.4 times as fast'
    >>> advice(costs_of(1.0, 0.98, 1.0, 0.89, 1.0, 0.9, 0.9, 1.3))
    'take strategy.compression=int8, 1.1 times as fast'
    >>> advice(costs_of(1.0, 1.0, 1.0, 1.0, 1.0, 0.95, 0.95, 1.3))
    'none pays off: the reduction adds 400% to a step, and no method makes it 1.1 times as fast'
    """
    base = costs[METHODS[0]]
    speeds = {method: base.step_seconds / cost.step_seconds for method, cost in costs.items()}

    def mildest(methods: Sequence[Method], baseline: float) -> Method | None:
        """Returns the first method that is nearly as fast as the fastest; None if even that gains too little."""
        worthy = [method for method in methods if speeds[method] >= baseline * MIN_SPEEDUP]
        fastest = max((speeds[method] for method in worthy), default=0.0)
        return next((method for method in worthy if speeds[method] * MIN_SPEEDUP >= fastest), None)

    parts = []
    speed = 1.0
    synchronous = mildest([method for method in costs if method.every == 1], speed)
    if synchronous:
        speed = speeds[synchronous]
        parts.append(f"take {synchronous.settings}, {speed:.1f} times as fast")
    local = mildest([method for method in costs if method.every > 1], speed)
    if local:
        parts.append(
            f"if ranks may drift apart, take {local.settings}, {speeds[local]:.1f} times as fast"
        )
    if parts:
        return "; ".join(parts)
    return (
        f"none pays off: the reduction adds {base.exposed_seconds / base.compute_seconds:.0%} to a step, "
        f"and no method makes it {MIN_SPEEDUP:g} times as fast"
    )


def main() -> None:
    """Measures the compression described on standard input, and prints the result for `measure_compression`."""
    import tensorflow as tf

    import hvtrain.keras as hvd
    from hvtrain.keras.compression import CompressedReduction, sent_bytes
    from hvtrain.keras.wire_formats import WireFormat

    wires, buckets = json.load(sys.stdin)
    hvd.init()
    specs = [[tf.TensorSpec(shape) for shape in bucket] for bucket in buckets]
    gradients = [tf.random.normal(spec.shape) for bucket in specs for spec in bucket]
    variables = [tf.Variable(gradient) for gradient in gradients]

    def measure(compression: str, rank: int) -> tuple[float, list[float]]:
        wire = getattr(hvd.Compression, compression)
        if compression == "powersgd":
            # Measures compressed steps, not the first ones of a run, which send whole gradients.
            wire = wire(rank, whole_steps=0)
        step = tf.function(
            lambda: [wire.decompress(*wire.compress(gradient)) for gradient in gradients],
            autograph=False,
        )
        if isinstance(wire, WireFormat):
            # The reduction of a run, so that the measured time includes keeping errors.
            reduction = CompressedReduction(wire, hvd.global_process_set)
            reduction.prepare(variables)
            step = tf.function(lambda: reduction(gradients, variables, "plan"), autograph=False)

        def timed_step() -> None:
            step()
            # A GPU may still compute after the call has returned.
            tf.test.experimental.sync_devices()

        timed_step()
        times = timeit.repeat(timed_step, number=1, repeat=REPETITIONS)
        # For 2 ranks, because in a ring of two each rank sends every
        # byte of a message exactly once.
        return median(times), [sent_bytes(bucket, wire, 2) for bucket in specs]

    print(json.dumps([measure(*wire) for wire in wires]))


if __name__ == "__main__":
    main()
