"""What the suite found, as a JSON file for docs/ and as a table: `python report.py gpu-suite.json` prints it. Pure.

conftest.py writes the file: `about` is the machine and the versions; `tests` has outcome, seconds and figures of each.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def table(result: dict[str, Any]) -> str:
    """Markdown: the machine, one row a test, and how many passed.

    >>> row = {"test": "test_a.py::test_b[c]", "outcome": "passed", "seconds": 1.25, "figures": {"a": 1e-07, "n": 2}}
    >>> print(table({"about": {"gpu": ["A", "B"]}, "tests": [row]}))
    - gpu: A; B
    <BLANKLINE>
    | test | outcome | seconds | figures |
    |---|---|---|---|
    | test_a: b[c] | passed | 1.2 | a 1e-07, n 2 |
    <BLANKLINE>
    1 passed in 1 s
    """
    about = [
        f"- {name}: {'; '.join(value) if isinstance(value, list) else value}"
        for name, value in result["about"].items()
    ]
    rows = ["| test | outcome | seconds | figures |", "|---|---|---|---|"]
    for entry in result["tests"]:
        file, _, name = entry["test"].partition(".py::test_")
        cells = [f"{file}: {name}", entry["outcome"], f"{entry['seconds']:.1f}", _figures(entry)]
        rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    counts = Counter(entry["outcome"] for entry in result["tests"])
    seconds = sum(entry["seconds"] for entry in result["tests"])
    total = ", ".join(f"{number} {outcome}" for outcome, number in counts.items()) or "no test ran"
    return "\n".join([*about, "", *rows, "", f"{total} in {seconds:.0f} s"])


def _figures(entry: dict[str, Any]) -> str:
    shown = [
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in entry["figures"].items()
    ]
    return ", ".join(shown) or entry.get("why", "")


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
