"""The site of scripts/site: built without a warning, complete, and read in a real browser from its folder."""

import doctest
import importlib.util
import os
import shutil
import subprocess
import sys
import time

import pytest

from browser import CHROMIUM, SIZES, Browser
from launching import ROOT

pytest.importorskip("mkdocs", reason="mkdocs is not installed; ./scripts/run pytest does it")
pytest.importorskip(
    "mkdocstrings", reason="mkdocstrings is not installed; ./scripts/run pytest does it"
)
pytestmark = pytest.mark.nightly

SITE = ROOT / "scripts/site"
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium; scripts/install-test-tools installs it"
)
# On a phone these wait beside the window until they are asked for; tables and listings scroll by themselves.
SCROLLS = ".md-sidebar, .md-search, .md-typeset__scrollwrap, .highlight"


def build(folder, config=SITE / "mkdocs.yml"):
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", folder]
    done = subprocess.run(
        line,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    code, output = build(folder)
    assert code == 0, output
    assert "WARNING" not in output and "ERROR" not in output
    return folder


@pytest.fixture(scope="module")
def browser():
    with Browser() as item:
        yield item


def test_every_page_is_there_and_none_leads_out_of_the_site(site):
    expected = {path.stem for path in (ROOT / "docs").glob("*.md")} | {
        "index",
        "contributing",
        "changes",
        "404",
    }
    assert {path.stem for path in site.glob("*.html")} == expected
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert "fonts.googleapis" not in text and "unpkg.com" not in text, page
        assert '.md"' not in text and ".md#" not in text, page


def test_the_example_of_the_hook():
    # Not "pages", which is the tests' own module: doctest leaves out what seems to come from another module.
    spec = importlib.util.spec_from_file_location("hook", SITE / "pages.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    assert doctest.testmod(hook) == (0, 1)


def test_the_api_has_what_is_public(site):
    keras = (site / "api/keras.html").read_text()
    for name in (
        "DistributedOptimizer",
        "BroadcastGlobalVariablesCallback",
        "allreduce",
        "SyncBatchNormalization",
    ):
        assert f'id="hvtrain.keras.{name}"' in keras, name
    assert 'id="hvtrain.data.from_arrays"' in (site / "api/data.html").read_text()
    assert 'id="hvtrain.train"' in (site / "api/hvtrain.html").read_text()


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_wider_than_the_page_and_the_console_is_silent(site, browser, size, dark):
    colors = set()
    for page in ("index", "tutorial", "faults", "configuration", "bench", "api/keras"):
        browser.problems.clear()
        browser.open(site / f"{page}.html", size, dark)
        assert [result for result in browser.too_wide(SCROLLS) if "DIV.md-s" not in result] == [], (
            page
        )
        assert browser.evaluate(
            "[...document.images].every(image => image.complete && image.naturalWidth)"
        ), page
        assert browser.problems == [], page
        colors.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colors == {"rgb(30, 33, 41)" if dark else "rgb(255, 255, 255)"}


@needs_chromium
def test_search_finds_without_a_server(site, browser):
    browser.open(site / "index.html", "desktop")
    browser.evaluate(
        "const field = document.querySelector('.md-search__input'); field.focus(); field.value = 'watchdog';"
        "field.dispatchEvent(new Event('keyup', {bubbles: true})); field.dispatchEvent(new Event('input'))"
    )
    links = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.getAttribute('href')).join()"
    deadline, result = time.monotonic() + 20, ""
    while not result and time.monotonic() < deadline:
        time.sleep(0.1)
        result = browser.evaluate(links)
    assert "faults.html" in result


def test_a_page_without_a_place_and_dead_links_end_the_build(tmp_path):
    """The same rules, for a copy of the guides in which three things are wrong."""
    shutil.copytree(SITE, tmp_path / "scripts/site")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    config = tmp_path / "scripts/site/without_api.yml"
    config.write_text("INHERIT: mkdocs.yml\nplugins: [search]\nwatch: []\n")
    (tmp_path / "docs/unnamed.md").write_text("# Unnamed\n")
    (tmp_path / "docs/glossary.md").write_text(
        "[this](nowhere.md) and [that](data.md#no-such-part)\n"
    )
    code, output = build(tmp_path / "site", config)
    assert code == 1 and "Aborted with 3 warnings" in output, output
    assert all(part in output for part in ("unnamed.md", "nowhere.md", "no-such-part")), output
