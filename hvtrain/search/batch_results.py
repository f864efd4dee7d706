"""What the search leaves: a line for each size, batch.json and batch.png."""

import json
from collections.abc import Sequence
from pathlib import Path

from hvtrain.core.records import write_atomic
from hvtrain.report.charts import picture
from hvtrain.search.fitting import Trial, fastest

MIB = 2**20


def in_words(trial: Trial) -> str:
    """One size in a line.

    >>> in_words(Trial(8, 16, 0.004, [3 * MIB, 2 * MIB]))
    'train.batch_size=8 (16 on all ranks): 4,000 examples/s, 4.00 ms a step, at most 3 MiB a rank'
    """
    return (
        f"train.batch_size={trial.batch_size} ({trial.global_batch:,} on all ranks): "
        f"{trial.examples_per_second:,.0f} examples/s, {1000 * trial.step_seconds:.2f} ms a step, "
        f"at most {max(trial.memory_bytes) / MIB:,.0f} MiB a rank"
    )


def write(folder: Path, trials: Sequence[Trial], ended: str | None = None) -> None:
    """Writes batch.json, and at the end, whose reason `ended` is, batch.png too (chief only)."""
    sizes = [{**vars(trial), "examples_per_second": round(trial.examples_per_second, 1)} for trial in trials]
    content = {"sizes": sizes, "ended": ended, "largest": trials[-1].batch_size, "fastest": fastest(trials).batch_size}
    write_atomic(folder / "batch.json", json.dumps(content, indent=2) + "\n")
    if ended is None:
        return
    numbers, best = [trial.batch_size for trial in trials], fastest(trials)
    with picture(folder / "batch.png", 7, 5, rows=2) as (_, (speed, memory)):
        rates, peaks = zip(*((trial.examples_per_second, max(trial.memory_bytes) / MIB) for trial in trials))
        speed.plot(numbers, rates, "o-", color="tab:blue")
        speed.axvline(best.batch_size, color="tab:orange", linestyle="--", label=f"fastest: {best.batch_size}")
        speed.set(ylabel="examples/s of all ranks", ylim=(0, 1.1 * max(rates)))
        speed.legend()
        memory.plot(numbers, peaks, "o-", color="tab:green")
        memory.set(xlabel="train.batch_size", ylabel="peak memory of a rank in MiB", ylim=(0, 1.1 * max(peaks)))
        for axes in (speed, memory):
            axes.set_xscale("log", base=2)
            axes.set_xticks(numbers, [str(number) for number in numbers])
