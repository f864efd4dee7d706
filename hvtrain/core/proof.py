"""The proof of a run in words. Pure."""

from typing import Any


def proof_in_words(numbers: dict[str, Any]) -> str:
    """The proof of a run in one line.

    >>> proof_in_words({"reductions": 264, "steps": 264, "ranks": 2, "weight_checks": 14,
    ...                 "examples_each_epoch": [1408, 1408], "examples": 1437})
    'reductions 264 of 264 steps; weights equal on 2/2 ranks (14 checks); 1,408 of 1,437 samples seen once per epoch'
    """
    ranks, checks = numbers["ranks"], numbers["weight_checks"]
    parts = []
    if ranks > 1:
        equal = f"weights equal on {ranks}/{ranks} ranks ({checks:,} check{'s' * (checks != 1)})"
        parts.append(f"reductions {numbers['reductions']:,} of {numbers['steps']:,} steps")
        parts.append(equal if checks else "weights not compared")
    if by_worker := numbers.get("steps_by_worker"):
        each = ", ".join(f"{number:,}" for number in by_worker)
        parts.append(f"gradients of {len(by_worker)} workers: {each}, for {numbers['steps']:,} steps")
    if seen := sorted(set(numbers["examples_each_epoch"])):
        counts = f"{seen[0]:,}" if len(seen) == 1 else f"{seen[0]:,} to {seen[-1]:,}"
        left_out = f", but for {skipped:,} that cannot be read" if (skipped := numbers.get("skipped")) else ""
        parts.append(f"{counts} of {numbers['examples']:,} samples seen once per epoch{left_out}")
    return "; ".join(parts) or "one rank, less than an epoch: nothing to prove"
