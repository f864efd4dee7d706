"""Pages of the documentation as a reader takes them: commands, files to copy, sections, tables.

A block without a language holds commands, or what a command prints; a block of `console` holds both. A block of Python
or YAML that begins with `# NAME` is a file of that name, and may hold several. Hydra reads `# @package` in the first
lines of a file alone, so it stands above the name.
"""

from __future__ import annotations

import re

from launching import ROOT

PATHS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {path.stem: path.read_text() for path in PATHS}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADER = r"^(?:# @[^\n]*\n)*# "
FILE = re.compile(
    rf"{HEADER}(\S+\.(?:py|yaml))\n.*?(?={HEADER}\S+\.(?:py|yaml)$|\Z)",
    re.MULTILINE | re.DOTALL,
)
LOOP = re.compile(r"^for .*?^done$", re.MULTILINE | re.DOTALL)
STARTS = re.compile(
    r"\s*(?:[\w./]*scripts/|python |horovodrun |CUDA|PYTHONPATH|CXXFLAGS"
    r"|for |docker|s\d\$|uv |pip |spark-|source |bash |export |git |mkdir |cd )"
)


def languages(text: str) -> set[str]:
    return {language for language, _ in FENCE.findall(text)}


def blocks(text: str, *languages: str) -> list[str]:
    """Blocks of these languages, in order; "" stands for none.

    >>> blocks("```\\nls\\n```\\n```python\\nimport keras\\n```", "python")
    ['import keras\\n']
    """
    return [block for language, block in FENCE.findall(text) if language in languages]


def files(text: str) -> dict[str, str]:
    """Files that stand on a page, by name, with the lines that a reader copies.

    >>> files("```yaml\\n# @package _global_\\n# a.yaml\\nx: 1\\n# b.yaml\\ny: 2\\n```\\n```python\\nimport os\\n```")
    {'a.yaml': '# @package _global_\\n# a.yaml\\nx: 1\\n', 'b.yaml': '# b.yaml\\ny: 2\\n'}
    """
    matches = [match for block in blocks(text, "python", "yaml") for match in FILE.finditer(block)]
    return {match[1]: match[0] for match in matches}


def commands(text: str) -> list[str]:
    """Commands of a page, without comments and `./scripts/run`: each is one line, a loop too.

    These are the lines of a block that begins with a command, other lines that look like one, and those with a prompt.

    >>> commands("```console\\n$ ./scripts/run pytest  # takes long\\n3 passed\\n```")
    ['pytest']
    >>> commands("```\\nfor n in 1 2; do\\n  python a.py $n\\ndone\\n```")
    ['for n in 1 2; do python a.py $n; done']
    >>> commands("```\\n3 steps; again by\\n  python \\\\\\n    a.py\\n```")
    ['python a.py']
    """
    lines = []
    for language, block in FENCE.findall(text):
        block = re.sub(r"\\\n\s*", "", block)
        block = LOOP.sub(_in_one_line, block)
        for line in block.splitlines() if language in ("", "console") else ():
            looks_like_one = STARTS.match(block) or STARTS.match(line)
            if line.startswith("$ ") or (line and looks_like_one and not language):
                command = re.split(r"\s+#\s", line.strip())[0]
                lines.append(command.removeprefix("$ ").removeprefix("./scripts/run "))
    return lines


def _in_one_line(loop: re.Match[str]) -> str:
    return re.sub(r"\n\s*", "; ", re.sub(r"; do\n\s*", "; do ", loop[0]))


def sections(text: str) -> dict[str, str]:
    """The text under each heading, up to the next one of any level.

    >>> sections("# Page\\n```python\\n# a.py\\n```\\n## Part\\nEnd.\\n")
    {'Page': '```python\\n# a.py\\n```\\n', 'Part': 'End.\\n'}
    """
    texts: dict[str, str] = {}
    title = ""
    in_block = False
    for line in text.splitlines(keepends=True):
        in_block ^= line.startswith("```")
        if line.startswith("#") and not in_block:
            title = line.strip("# \n")
            texts[title] = ""
        else:
            texts[title] = texts.get(title, "") + line
    return texts


def prose(text: str) -> str:
    """The page without its blocks."""
    return FENCE.sub("", text)


def rows(text: str) -> dict[str, list[str]]:
    """Rows of all tables: the first cell, and the others.

    >>> rows("| a | b |\\n|---|---|\\n| x | 1 |")
    {'a': ['b'], '---': ['---'], 'x': ['1']}
    """
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    return {first: others for first, *others in cells}
