"""The cost model at its limits: formulas, fusion, overlap, stragglers, and the fit."""

import math
from dataclasses import replace

import numpy as np
import pytest

from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.errors import ConfigError
from hvtrain.keras import wire_formats
from hvtrain.models.memory import Footprint
from hvtrain.plan.algorithms import (
    ALGORITHMS,
    Link,
    Machine,
    allreduce_seconds,
    flat_ring_seconds,
    halving_seconds,
    hierarchical_seconds,
    ring_seconds,
    tree_seconds,
)
from hvtrain.plan.machine import Measured, fit
from hvtrain.plan.methods import (
    METHODS,
    PIECE_BYTES,
    CompressionCost,
    advice,
    method_cost,
    method_of,
    sent_bytes,
)
from hvtrain.plan.step_cost import Gradient, Rules, Work, expected_maximum, slowdown, step_cost

SLOW_NETWORK = Machine(Link(5e-6, 10e9), Link(2e-5, 1e9), ranks_per_host=4)
WORK = Work(0.1, [Gradient(4_000_000, 1.0)] * 20)
PLAIN = Rules(interference=0, deviation=0, cycle_seconds=0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_rank_reduces_for_nothing(algorithm):
    assert ALGORITHMS[algorithm](1e9, 1, SLOW_NETWORK) == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_ranks", [2, 4, 5, 8, 64, 1000])
def test_more_bytes_a_slower_link_and_more_latency_take_longer(algorithm, num_ranks):
    seconds = ALGORITHMS[algorithm]
    base = seconds(1e8, num_ranks, SLOW_NETWORK)
    assert seconds(2e8, num_ranks, SLOW_NETWORK) > base > 0
    faster = replace(SLOW_NETWORK, inside=Link(5e-6, 20e9), between=Link(2e-5, 2e9))
    assert seconds(1e8, num_ranks, faster) < base
    assert (
        seconds(1e8, num_ranks, replace(SLOW_NETWORK, between=Link(1, 1e9), inside=Link(1, 1e9)))
        > base
    )


def test_a_ring_is_bound_by_bandwidth_for_large_messages_and_by_its_length_for_small_ones():
    link = Link(1e-5, 1e9)
    assert ring_seconds(1e12, 1000, link) == pytest.approx(2e12 / 1e9, rel=0.002)
    assert ring_seconds(4, 1000, link) == pytest.approx(1998e-5, rel=1e-6)
    assert halving_seconds(4, 1024, link) == pytest.approx(20e-5, rel=1e-3)
    assert tree_seconds(4, 1024, Machine(link, link, 1)) == pytest.approx(20e-5, rel=1e-3)


def test_hosts_reduced_first_beat_one_ring_over_a_slow_network():
    """The bytes on the host's link are the same, but the latency counts hosts."""
    for num_bytes in (4, 4e3, 1e6):
        ring, by_hosts = (
            f(num_bytes, 512, SLOW_NETWORK) for f in (flat_ring_seconds, hierarchical_seconds)
        )
        assert by_hosts < ring / 2
    by_hosts = hierarchical_seconds(4e9, 512, SLOW_NETWORK)
    assert by_hosts == pytest.approx(flat_ring_seconds(4e9, 512, SLOW_NETWORK), rel=0.1)


def test_the_fastest_algorithm_is_taken_and_the_start_added():
    for num_bytes in (4, 4e6, 4e9):
        seconds = {name: f(num_bytes, 96, SLOW_NETWORK) for name, f in ALGORITHMS.items()}
        fastest_seconds, name = allreduce_seconds(
            num_bytes, 96, replace(SLOW_NETWORK, start_seconds=0.5)
        )
        assert fastest_seconds == pytest.approx(0.5 + min(seconds.values())) and seconds[
            name
        ] == min(seconds.values())


def test_the_expected_maximum_is_that_of_a_simulation():
    drawn = np.random.default_rng(0).standard_normal((20_000, 64)).max(axis=1).mean()
    assert expected_maximum(64) == pytest.approx(drawn, abs=0.01)
    assert expected_maximum(10**4) < math.sqrt(2 * math.log(10**4))
    assert slowdown(1, 0.3) == pytest.approx(1)


@pytest.mark.parametrize("num_ranks", [2, 8, 512])
@pytest.mark.parametrize("bandwidth", [1e8, 1e9, 1e11])
def test_overlap_never_makes_a_step_longer(num_ranks, bandwidth):
    machine = replace(SLOW_NETWORK, between=Link(2e-5, bandwidth), inside=Link(5e-6, bandwidth))
    for rules in (PLAIN, replace(PLAIN, fusion_bytes=1 << 20), replace(PLAIN, deviation=0.05)):
        apart, together = (
            step_cost(WORK, num_ranks, machine, replace(rules, overlap=way))
            for way in (False, True)
        )
        # Other buffers are made, so the latencies are others: not longer by more than those.
        latency = together.num_buffers * allreduce_seconds(0, num_ranks, machine)[0]
        assert together.step_seconds <= apart.step_seconds + latency
        assert together.step_seconds >= WORK.step_seconds


def test_without_overlap_all_of_the_reduction_is_exposed():
    cost = step_cost(WORK, 8, SLOW_NETWORK, PLAIN)
    assert cost.num_buffers == 1
    assert cost.exposed_seconds == pytest.approx(cost.communication_seconds)
    assert cost.step_seconds == pytest.approx(
        0.1 + flat_ring_seconds(80e6, 8, SLOW_NETWORK), rel=0.1
    )


def test_a_wide_network_hides_all_but_the_last_buffer():
    machine = Machine(Link(0, 1e12), Link(0, 1e12), 4)
    cost = step_cost(WORK, 512, machine, replace(PLAIN, overlap=True))
    assert cost.efficiency > 0.999 and cost.exposed_seconds < 1e-4


def test_buffers_hold_what_fits():
    for fusion_bytes, buffers in ((1, 20), (8_000_000, 10), (9_000_000, 10), (80_000_000, 1)):
        assert (
            step_cost(WORK, 2, SLOW_NETWORK, replace(PLAIN, fusion_bytes=fusion_bytes)).num_buffers
            == buffers
        )


def test_one_rank_is_its_own_measure():
    cost = step_cost(WORK, 1, SLOW_NETWORK, Rules())
    assert (cost.efficiency, cost.communication_seconds, cost.algorithm) == (
        pytest.approx(1),
        0,
        "none",
    )


def test_efficiency_falls_with_ranks_and_rises_with_the_link():
    by_ranks = [
        step_cost(WORK, number, SLOW_NETWORK, Rules(overlap=True)).efficiency
        for number in (1, 8, 64, 512)
    ]
    assert by_ranks == sorted(by_ranks, reverse=True)
    machines = [replace(SLOW_NETWORK, between=Link(2e-5, speed)) for speed in (1e8, 1e9, 5e9)]
    by_link = [step_cost(WORK, 64, machine, Rules()).efficiency for machine in machines]
    assert by_link == sorted(by_link) and by_link[0] < 0.2


def test_interference_makes_computing_longer_by_its_share_of_the_time_that_bytes_move():
    machine = Machine(Link(0, 1e9), Link(0, 1e9), 1)
    work = Work(1.0, [Gradient(100_000_000, 1.0), Gradient(4, 99.0)])
    free, held = (
        step_cost(work, 2, machine, replace(PLAIN, overlap=True, interference=share))
        for share in (0.0, 0.2)
    )
    assert held.step_seconds - free.step_seconds == pytest.approx(0.2 * 0.1, rel=0.01)


def test_each_method_against_a_slow_network_costs_its_bytes_its_compression_and_its_share_of_the_steps():
    """Two ranks, two messages of 10 MB at 10 MB/s, 2 ms to start each, a step of 0.1 s; nothing overlaps."""
    plain = Machine(Link(0, 1e7), Link(0, 1e7), 1, start_seconds=0.002)
    exchanges = {
        kind: replace(plain, between=Link(0, 1e7, corrections=((1, factor),)))
        for kind, factor in (("gather", 1.5), ("bytes", 1.4), ("half", 1.2))
    }
    machine = replace(plain, exchanges=exchanges)
    work = Work(0.1, [Gradient(10_000_000, 1.0)] * 2)
    rules = replace(PLAIN, fusion_bytes=0)
    encoded = {
        ("fp16", 4): CompressionCost(0.03, [5e6, 5e6]),
        ("bf16", 4): CompressionCost(0.04, [5e6, 5e6]),
        ("int8", 4): CompressionCost(0.05, [2.5e6, 2.5e6]),
        ("powersgd", 4): CompressionCost(0.06, [1e5, 1e5]),
    }
    seconds = {method.compression: 0.1 for method in METHODS}
    seconds["none"] += 2 * (0.002 + 1.0)
    seconds["fp16"] += 0.03 + 2 * 1.2 * (0.002 + 0.5)
    seconds["bf16"] += 0.04 + 2 * 1.4 * (0.002 + 0.5)
    seconds["int8"] += 0.05 + 2 * 1.4 * (0.002 + 0.25)
    seconds["powersgd"] += 0.06 + 2 * (0.002 + 0.01)
    # plan has a copy, since importing wire_formats loads Horovod.
    assert PIECE_BYTES == wire_formats.PIECE_BLOCKS * wire_formats.BLOCK * 4
    # Three ranks do not swap their bytes.
    int8 = next(method for method in METHODS if method.compression == "int8")
    swapping = replace(plain, exchanges={"bytes": exchanges["bytes"]})
    assert method_cost(int8, work, encoded, 3, swapping, rules) == method_cost(
        int8, work, encoded, 3, plain, rules
    )
    costs = [method_cost(method, work, encoded, 2, machine, rules) for method in METHODS]
    for method, cost in zip(METHODS, costs):
        expected = seconds[method.compression]
        if method.every > 1:
            expected = 0.1 + (expected - 0.1) / method.every
        if method.shard_optimizer:
            expected += 1.5 * (0.002 + 2.0) / 2
        assert cost.step_seconds == pytest.approx(expected), method
        assert cost.efficiency == pytest.approx(0.1 / expected)
        assert method_cost(method, work, encoded, 1, machine, rules).step_seconds == pytest.approx(
            0.1
        )
    accumulated = method_cost(METHODS[3], work, encoded, 2, machine, rules, accumulate=8)
    assert accumulated.step_seconds - 0.1 == pytest.approx((seconds["int8"] - 0.1) / 8)
    assert sent_bytes(METHODS[3], work, encoded, 4, accumulate=8) == pytest.approx(5e6 * 1.5 / 8)
    assert sent_bytes(METHODS[3], work, encoded, 4) == pytest.approx(5e6 * 1.5)
    assert sent_bytes(METHODS[5], work, encoded, 2) == pytest.approx(2e7 / 16)
    assert advice(dict(zip(METHODS, costs))).startswith(
        "take strategy.compression=powersgd, 11.4 times as fast; if ranks may drift "
    )

    fast = Machine(Link(0, 1e10), Link(0, 1e10), 1)
    costs = [method_cost(method, work, encoded, 2, fast, rules) for method in METHODS]
    assert advice(dict(zip(METHODS, costs))).startswith(
        "none pays off: the reduction adds 2% to a step"
    )


@pytest.mark.parametrize(
    ("setting", "fitting"),
    [
        ("train.precision=mixed_float16", {"none", "fp16", "bf16"}),
        ("train.accumulate=2", {"none", "fp16", "bf16", "int8", "powersgd"}),
    ],
)
def test_only_methods_that_the_run_takes_are_compared(setting, fitting):
    config = from_dict(compose(["model=mlp", setting]))
    methods = [method for method in METHODS if method.fits(config)]
    assert {method.compression for method in methods} == fitting
    assert {method.every for method in methods} == {1}
    assert all(method.fits(from_dict(compose(["model=mlp"]))) for method in METHODS)


def test_what_a_runs_settings_choose_has_its_memory():
    sizes = Footprint(weight_bytes=100, gradient_bytes=80, slot_bytes=160, activation_bytes=None)
    diloco = method_of({"every": 500, "outer_rate": 0.7, "compression": "int8"})
    assert (diloco.every, diloco.compression) == (500, "int8")
    assert diloco.extra_bytes(sizes, 4) == {"errors": 80, "anchors and outer momentum": 160}
    assert method_of({"shard_optimizer": True}).extra_bytes(sizes, 4) == {
        "optimizer slots": 40 - 160
    }
    assert method_of({"compression": "none", "bucket_mib": 25}).extra_bytes(sizes, 4) == {}
    assert diloco.rank_bytes(sizes) == 80 + 160, "errors and slots of each rank are saved"
    assert method_of({"compression": "powersgd"}).rank_bytes(sizes) == 80
    assert method_of({"shard_optimizer": True}).rank_bytes(sizes) == 0, "slots are saved whole"


def test_a_fit_finds_the_link_through_noise():
    random = np.random.default_rng(0)
    best = fit(
        [
            Measured(
                ranks,
                size,
                (3e-4 + 2 * (ranks - 1) * (2e-5 + size / ranks / 2e9)) * random.normal(1, 0.03),
            )
            for ranks in (2, 4, 8)
            for size in (4, 4096, 1 << 20, 1 << 24, 1 << 28)
            for _ in range(7)
        ]
    )
    assert best.bytes_per_second == pytest.approx(2e9, rel=0.03)
    assert best.start_seconds == pytest.approx(3e-4, rel=0.1)
    assert best.latency_seconds == pytest.approx(2e-5, rel=0.2)
    assert 0.01 < best.error < 0.05


def test_a_fit_makes_no_negative_times():
    """What falls with the ranks is noise, not latency."""
    best = fit(
        [
            Measured(ranks, size, 1e-3 / ranks + size / 1e9)
            for ranks in (2, 4)
            for size in (4, 1 << 24)
        ]
    )
    assert (
        best.start_seconds >= 0 and best.latency_seconds is not None and best.latency_seconds >= 0
    )


@pytest.mark.parametrize(
    ("measurements", "message"),
    [
        (
            [Measured(2, 4, 1e-3)],
            "two sizes or more, on 2 ranks or more: run python -m hvtrain allreduce",
        ),
        ([Measured(1, 4, 1e-3), Measured(1, 8, 1e-3)], "two sizes or more, on 2 ranks"),
        ([Measured(2, 4, 1.0), Measured(2, 1 << 20, 0.1)], "take no longer for larger messages"),
    ],
)
def test_what_cannot_be_fitted_is_said(measurements, message):
    with pytest.raises(ConfigError, match=message):
        fit(measurements)
