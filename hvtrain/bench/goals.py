"""What hvtrain is held to: ratios in one run, on 2 ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """figure of `ours` / figure of `theirs` is at most, or where more is better at least, limit."""

    workload: str
    figure: str
    ours: str
    theirs: str
    limit: float

    @property
    def smaller_is_better(self) -> bool:
        return self.figure != "images_per_second"


def goals_of(workload: str) -> list[Goal]:
    """The goals for a workload."""
    return [goal for goal in _GOALS if goal.workload == workload]


def _against_loops(workload: str, limit: float) -> list[Goal]:
    return [Goal(workload, "step_seconds", f"hvtrain-{way}", f"loop-{way}", limit) for way in ("mpi", "gloo")]


_EACH = ("tiny", "cnn", "wide", "separable", "resnet20")
_GOALS = [
    *_against_loops("tiny", 0.90),
    *(goal for name in ("cnn", "separable", "wide") for goal in _against_loops(name, 0.95)),
    *(Goal(name, "images_per_second", "hvtrain-mpi", "multi-worker", limit)
      for name, limit in (("tiny", 6.0), ("cnn", 1.4), ("wide", 2.0))),
    *(Goal(name, "images_per_second", "hvtrain-mpi", "parameter-server", limit)
      for name, limit in (("cnn", 2.0), ("wide", 4.0))),
    *(Goal(name, "step_seconds", "hvtrain-1", "keras", 1.0) for name in _EACH),
    *(Goal(name, "images_per_second", "hvtrain-mpi", "independent", limit)
      for name, limit in (("cnn", 0.95), ("wide", 0.80))),
    *(Goal(name, "first_step_seconds", "hvtrain-mpi", "loop-mpi", 1.10) for name in _EACH),
    *(Goal(name, "peak_bytes", "hvtrain-mpi", "loop-mpi", 1.0) for name in _EACH),
]  # fmt: skip
