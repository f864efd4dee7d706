"""compare.html: the whole comparison on one page, which needs nothing from elsewhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvtrain.compare.pictures import svgs
from hvtrain.compare.summary import rows

TEMPLATE = "compare.html.j2"


def html(found: Mapping[str, Any]) -> str:
    """The page of a comparison as compare.json holds it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    numbers = sorted({run["round"] for one in found["strategies"] for run in one["rounds"]})
    return made.get_template(TEMPLATE).render(
        found=found, overview=rows(found), by_round=_by_round(found, numbers), numbers=numbers, charts=svgs(found)
    )


def _by_round(found: Mapping[str, Any], numbers: list[int]) -> list[list[str]]:
    """Examples per second of each strategy in each round."""
    lines = []
    for one in found["strategies"]:
        speeds = {run["round"]: run["examples_per_second"] for run in one["rounds"]}
        lines.append([one["name"], *(f"{speeds[number]:,.0f}" if speeds.get(number) else "-" for number in numbers)])
    return lines
