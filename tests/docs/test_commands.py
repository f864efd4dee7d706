"""Settings in the commands of all pages: each command composes, in a folder of one's own. Other tests run them."""

import re
import shlex

import pytest

from hvtrain import compose
from launching import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# These take the settings of a run, beside options of their own; hvtrain.launch takes them after --.
NAMES = ("doctor", "find_batch", "find_lr", "launch", "plan", "verify")
MODULES = ("hvtrain", *(f"hvtrain.{name}" for name in NAMES))


def settings(line):
    """The words of a run in a command line, or None if it starts none; `...` and $NAME stand for others."""
    words = shlex.split(line, comments=True)
    if "-m" not in words or words[words.index("-m") + 1 :][:1] not in [[module] for module in MODULES]:
        return None
    module, *words = words[words.index("-m") + 1 :]
    if module == "hvtrain.launch":
        words = words[words.index("--") + 1 :] if "--" in words else []
    return [] if words[:1] == ["python"] else [word for word in words if re.match(r"[+~]?[\w.@/]+=(?!\.\.\.|\$)", word)]


def commands(text):
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n\s*", "", block).splitlines() if language in ("", "console") else ():
            if "python -m hvtrain" in line and "--config-dir" not in line and not line.startswith("hvtrain: "):
                yield line.removeprefix("$ ")


FOUND = {
    (page.stem, *words): words for page in PAGES for line in commands(page.read_text()) if (words := settings(line))
}


@pytest.mark.parametrize("words", FOUND.values(), ids=[" ".join(key[:2]) for key in FOUND])
def test_the_settings_of_a_command_are_settings(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compose(words)


def test_there_are_many_of_them():
    assert len(FOUND) >= 50
    assert settings("horovodrun -np 2 python -m hvtrain 'model.freeze=[conv*]' dataset=...  # half") == [
        "model.freeze=[conv*]"
    ]
