"""docs/tutorial.md: its commands print each line that the page shows for them."""

import re

import pytest

from lab import Lab, needs_lab
from launching import ROOT, run
from pages import PAGES, blocks, sections

SECTIONS = {title: blocks(text, "console") for title, text in sections(PAGES["tutorial"]).items()}


def pattern(line):
    """The page's line with any number in a number's place, s1 not being one, and anything in the place of dots.

    >>> bool(pattern("rank 1 host s2: 3.5 s; ...").search("rank 0 host s2: 12 s; run it again"))
    True
    >>> bool(pattern("rank 1 host s2: 3.5 s").search("rank 1 host s3: 3.5 s"))
    False
    """
    parts = [
        re.escape(part) for part in re.split(r"(?<![a-z])\d[\d.,:]*", line.removesuffix(" ..."))
    ]
    text = re.sub(r"(\\ )+", " +", r"[\d.,:]+".join(parts))
    return re.compile(f"^{text}{'.*' if line.endswith(' ...') else '$'}", re.MULTILINE)


def follow(section, folder, lab):
    """Runs a section's commands; what they print must have the lines that stand under them."""
    lines = [line for block in SECTIONS[section] for line in block.splitlines()]
    commands = "\n".join(line[2:] for line in lines if line.startswith("$ "))
    code, output = run(
        None,
        1,
        "bash",
        "-ec",
        commands,
        cwd=folder,
        HVTRAIN_LAB=lab.name,
        OPAL_PREFIX="",
        timeout=580,
    )
    assert code == 0, output
    missing = [
        line for line in lines if not line.startswith("$ ") and not pattern(line).search(output)
    ]
    assert not missing, output


@pytest.fixture
def folder(tmp_path):
    """A folder that looks like the clone; runs lie in it."""
    for name in (".venv", "conf", "hvtrain", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "runs").mkdir()
    return tmp_path


# It takes minutes, because ranks start in each section and some wait for a fault. tests/checks and tests/launch hold
# these faults nightly.
@pytest.mark.distributed
@needs_lab
@pytest.mark.release
@pytest.mark.timeout(1800)
def test_the_whole_page(folder):
    lab = Lab(4)
    try:
        for section in SECTIONS:
            follow(section, folder, lab)
        assert not lab.state.exists(), "its last command ended the lab"
    finally:
        lab("down")


def test_the_page_has_these_sections():
    assert [title for title, listings in SECTIONS.items() if listings] == [
        "Tutorial: from one process to four hosts", "One process", "Two ranks", "Hosts", "Faults that the doctor finds",
        "A slow cable", "A killed rank", "A rank that hangs", "A lost host",
    ]  # fmt: skip
    assert len(PAGES["tutorial"].splitlines()) <= 200
