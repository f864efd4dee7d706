"""Published runs as inputs of the cost model, with what was published of their speed and where.

    python -m benchmarks.plan_published            the table of docs/plan.md: published against predicted
    python -m benchmarks.plan_published --fit      how the three constants were found

Every input is a published figure: images a second of one GPU, batch, links, GPUs of a host, the
network's gradients (networks.json has them as keras.applications builds them;
tests/plan/test_published.py checks). No publication gives the rest, one set of constants for all
cases: algorithms.LINK_SHARE, step_cost.Rules.interference and .deviation, fitted to FITTED alone, and
the latencies, which are those of NCCL's own tuning.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from hvtrain.plan.algorithms import (
    LINK_SHARE,
    NETWORK_SECONDS,
    NVLINK_SECONDS,
    PCIE_SECONDS,
    Link,
    Machine,
)
from hvtrain.plan.step_cost import MIB, Cost, Gradient, Rules, Work, step_cost

_NETWORKS = json.loads(Path(__file__).with_name("networks.json").read_text())
NETWORKS = {name: [Gradient(*pair) for pair in gradients] for name, gradients in _NETWORKS.items()}


@dataclass(frozen=True)
class Case:
    """A published efficiency of num_ranks GPUs, against one GPU or against against_ranks of them.

    Attributes:
        name: Who published it.
        network: Key of NETWORKS.
        num_ranks: GPUs.
        published: Efficiency.
        images_per_second: Of one GPU.
        batch_size: Of one GPU.
        ranks_per_host: GPUs of a host.
        inside_gbytes: Speed of the links inside a host, in GB/s.
        inside_latency_seconds: Of one step of a ring on them.
        gbits: Nominal speed between hosts, in Gbit/s; 0 on one host.
        rules: How its version of Horovod reduced.
        source: Where it was published.
        against_ranks: GPUs with efficiency 1.
    """

    name: str
    network: str
    num_ranks: int
    published: float
    images_per_second: float
    batch_size: int
    ranks_per_host: int
    inside_gbytes: float
    inside_latency_seconds: float
    gbits: float
    rules: Rules
    source: str
    against_ranks: int = 1

    @property
    def work(self) -> Work:
        return Work(self.batch_size / self.images_per_second, NETWORKS[self.network])

    def machine(self, share: float = LINK_SHARE) -> Machine:
        inside = Link(self.inside_latency_seconds, self.inside_gbytes * 1e9 * share)
        # On one host there is no network; no figure of it is used.
        between = (
            Link(NETWORK_SECONDS, self.gbits / 8 * 1e9 * share) if self.gbits else Link(0.0, 1.0)
        )
        return Machine(inside, between, self.ranks_per_host)

    def cost(self, num_ranks: int | None = None) -> Cost:
        return step_cost(self.work, num_ranks or self.num_ranks, self.machine(), self.rules)

    @property
    def predicted(self) -> float:
        return self.cost().efficiency / self.cost(self.against_ranks).efficiency

    @property
    def points(self) -> float:
        """By how many points the prediction is above what was published."""
        return 100 * (self.predicted - self.published)


# NCCL before 2.4 (2019) has rings alone; Horovod before 0.21 (November 2020) buffers of 64 MB and
# cycles of 5 ms.
HOROVOD_OF_2018 = Rules(
    overlap=True, fusion_bytes=64 * MIB, cycle_seconds=5e-3, algorithms=("ring",)
)
HOROVOD_OF_2020 = replace(HOROVOD_OF_2018, algorithms=("ring", "tree"))
# Each gradient by itself as soon as it is there, NCCL in the host and halving and doubling between
# hosts (section 4).
GOYAL = Rules(overlap=True, fusion_bytes=1, cycle_seconds=0.0, algorithms=("hierarchical",))

README_OF_16 = "Horovod's README until its pull request #44 of October 2017, which shows the table (RDMA, NCCL)"
README_OF_128 = (
    "Horovod's README after its pull request #44 (32 hosts of 4 Pascal GPUs, RoCE, 25 Gbit/s)"
)
README_OF_512 = "Horovod's docs/benchmarks.rst (128 hosts of 4 Pascal GPUs, RoCE, 25 Gbit/s)"
# One P100 with batch 64, the baseline of the table until October 2017; and images a second of 16.
ONE_GPU = {"InceptionV3": 134.4, "ResNet101": 119.4, "VGG16": 130.9}
OF_16 = {"InceptionV3": 2022.6, "ResNet101": 1746.2, "VGG16": 1787.4}


def _uber(network_name: str, num_ranks: int, published: float, source: str) -> Case:
    return Case(
        name="Horovod",
        network=network_name,
        num_ranks=num_ranks,
        published=published,
        images_per_second=ONE_GPU[network_name],
        batch_size=64,
        ranks_per_host=4,
        # What joins the GPUs inside is not published; PCIe 3.0 x16 has 15.75 GB/s, and the network
        # is the bottleneck.
        inside_gbytes=15.75,
        inside_latency_seconds=PCIE_SECONDS,
        gbits=25,
        rules=HOROVOD_OF_2018,
        source=source,
    )


def _nvidia(name: str, speed: float, batch_size: int, num_ranks: int, all_speed: float) -> Case:
    """A run on one host. speed, all_speed: images a second of one GPU and of all."""
    return Case(
        name=name,
        network="ResNet50",
        num_ranks=num_ranks,
        published=all_speed / speed / num_ranks,
        images_per_second=speed,
        batch_size=batch_size,
        ranks_per_host=num_ranks,
        inside_gbytes=150.0,  # NVLink of a V100: six links of 25 GB/s in each direction.
        inside_latency_seconds=NVLINK_SECONDS,
        gbits=0.0,
        rules=HOROVOD_OF_2020,
        source="NVIDIA DeepLearningExamples, TensorFlow ResNet-50 v1.5 README, training performance (20.06, XLA)",
    )


FITTED = [
    *(_uber(name, 16, OF_16[name] / 16 / ONE_GPU[name], README_OF_16) for name in ONE_GPU),
    _uber("InceptionV3", 128, 0.90, README_OF_128),
    _uber("ResNet101", 128, 0.90, README_OF_128),
    _uber("VGG16", 128, 0.79, README_OF_128),
]
PREDICTED = [
    _uber("InceptionV3", 512, 0.90, README_OF_512),
    _uber("ResNet101", 512, 0.90, README_OF_512),
    _uber("VGG16", 512, 0.68, README_OF_512),
    _nvidia("DGX-1, FP32", 412, 128, 8, 3170),
    _nvidia("DGX-1, mixed", 1270, 256, 8, 9510),
    _nvidia("DGX-2, FP32", 432, 128, 16, 6500),
    # 90 epochs of 1,281,167 images took 29 hours on 8 GPUs; NVLink 1 of a P100: four links of 20
    # GB/s each way.
    Case(
        name="Goyal et al.",
        network="ResNet50",
        num_ranks=256,
        published=0.90,
        images_per_second=90 * 1_281_167 / (29 * 3600) / 8,
        batch_size=32,
        ranks_per_host=8,
        inside_gbytes=80.0,
        inside_latency_seconds=NVLINK_SECONDS,
        gbits=50,
        rules=GOYAL,
        source="arXiv:1706.02677, abstract and section 4 (8 P100 a host, 50 Gbit/s); "
        "29 hours on 8: NVIDIA's news of it",
        against_ranks=8,
    ),
]
# What the model does not reach: it has no input pipeline, and knows no other reason why mixed
# precision loses here.
MISSED = [_nvidia("DGX-2, mixed", 1300, 256, 16, 17250)]


def table() -> list[str]:
    """In lines of Markdown."""
    lines = [
        "| run | network | GPUs | published | predicted | points off | |",
        "|---|---|---|---|---|---|---|",
    ]

    for kind, cases in (("fitted", FITTED), ("predicted", PREDICTED), ("**missed**", MISSED)):
        for case in cases:
            lines.append(
                f"| {case.name} | {case.network} | {case.num_ranks} | {case.published:.1%} | {case.predicted:.1%} | "
                f"{case.points:+.1f} | {kind} |"
            )

    return lines


def fitted() -> tuple[float, float, float]:
    """The share, interference and deviation of a coarse grid with the smallest sum of squared errors on FITTED."""
    grid = itertools.product(
        (0.75, 0.775, 0.8, 0.825, 0.85, 0.875, 0.9),
        (0.05, 0.1, 0.15, 0.2),
        (0.015, 0.02, 0.025, 0.03, 0.035),
    )

    def squared_error(constants: tuple[float, float, float]) -> float:
        share, interference, deviation = constants
        total = 0.0
        for case in FITTED:
            rules = replace(case.rules, interference=interference, deviation=deviation)
            cost = step_cost(case.work, case.num_ranks, case.machine(share), rules)
            total += (cost.efficiency - case.published) ** 2
        return total

    return min(grid, key=squared_error)


if __name__ == "__main__":
    if sys.argv[1:] == ["--fit"]:
        print("share, interference, deviation:", *fitted())
    else:
        print("\n".join(table()))
