"""README and docs agree with each other, with the files that they name, and with the settings that exist."""

import dataclasses
import doctest
import re
import typing
from collections.abc import Iterator

import pytest

import pages
from hvtrain.config.schema import GROUPS, SEVERAL, ModelOptions, RunConfig
from launching import ROOT
from pages import PAGES, PATHS, prose, rows, sections

README = PAGES["README"]
BENCH = PAGES["bench"]
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
# Rows of README's table of speed, and where docs/bench.md has the same.
ROWS = {
    "step time / that of a hand-written Horovod loop": "step time / hand-written loop",
    "throughput / that of MultiWorkerMirroredStrategy": "throughput / `multi-worker`",
    "throughput / that of independent jobs, which never communicate": "throughput / `independent`",
}


def speeds(readme: str, bench: str) -> Iterator[tuple[str, str]]:
    """Pairs of figures, README's and docs/bench.md's, for each cell of README's table of speed."""
    known = rows(bench)
    for mine, expected in ROWS.items():
        (row,) = [cells for first, cells in known.items() if first.startswith(expected)]
        for cell, result in zip(rows(readme)[mine], row):
            yield cell, (NUMBER.findall(result) or [""])[0]


def quoted(readme: str) -> list[str]:
    """Figures of speed in README's prose."""
    text = re.sub(r"^\|.*$", "", prose(readme), flags=re.MULTILINE)
    unit = r"(?: to [\d.,]+)?\s*(?:times|ms\b|us\b|examples/s|GB/s|of the (?:time|speed)|% (?:faster|slower|of))"
    return [
        number
        for match in re.finditer(rf"{NUMBER.pattern}{unit}", text)
        for number in NUMBER.findall(match[0])
    ]


def agree(readme: str, bench: str) -> bool:
    tables = {
        number
        for cells in rows(bench).values()
        for cell in cells
        for number in NUMBER.findall(cell)
    }
    return (
        all(mine == expected for mine, expected in speeds(readme, bench))
        and set(quoted(readme)) <= tables
    )


def test_speeds_in_the_readme_are_those_of_docs_bench():
    assert len([cell for cell, _ in speeds(README, BENCH) if cell]) >= 8
    assert agree(README, BENCH), [pair for pair in speeds(README, BENCH) if pair[0] != pair[1]]


def test_another_figure_is_seen():
    for cell in {cell for cell, _ in speeds(README, BENCH) if cell}:
        assert not agree(README.replace(f"| {cell} |", f"| {cell}1 |"), BENCH), cell
        assert not agree(README, BENCH.replace(f"| {cell} [", "| 9.99 [")), cell
    assert not agree(README + "\nA step takes 0.123 of the time.\n", BENCH)
    assert not agree(README + "\nIt is 7.77 times as fast.\n", BENCH)


def test_lengths():
    assert len(README.splitlines()) <= 150
    assert len(BENCH.splitlines()) <= 120


def test_configuration_lists_all_settings_with_their_defaults():
    def settings(schema: type, prefix: str = "") -> Iterator[tuple[str, str]]:
        for item in dataclasses.fields(schema):
            section = typing.get_type_hints(schema)[item.name]
            if dataclasses.is_dataclass(section):
                yield from settings(typing.cast(type, section), f"{prefix}{item.name}.")
            elif item.name not in (*GROUPS, *SEVERAL):
                yield (
                    prefix + item.name,
                    "null" if item.default is None else str(item.default).lower(),
                )

    text = PAGES["configuration"].partition("\n## Settings\n")[2]
    result = {
        first.strip("`"): cells[0].strip("`") for first, cells in rows(text).items() if "`" in first
    }
    assert result == dict([*settings(RunConfig), *settings(ModelOptions, "model.")])


@pytest.mark.parametrize("page", PATHS, ids=lambda page: page.name)
def test_files_and_links_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[\w-]+)?\)", text):
        assert (page.parent / target).exists(), target
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([\w-]+)\)", text):
        headings = sections(((page.parent / target) if target else page).read_text())
        assert anchor in [
            re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings
        ], anchor
    for path in re.findall(
        r"(?<![\w/])(?:tests|scripts|hvtrain|benchmarks)/[\w/.-]*\w", prose(text)
    ):
        assert list(ROOT.glob(path)), path
    for module in re.findall(r"python -m ((?:hvtrain|tests|benchmarks)[\w.]*\w)", text):
        location = ROOT / module.replace(".", "/")
        assert location.is_dir() or location.with_suffix(".py").exists(), module


def test_the_examples_of_the_parser():
    assert doctest.testmod(pages) == (0, 7)
