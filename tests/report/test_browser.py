"""Pages in a real browser, at the width of a desktop and of a phone, light and dark."""

import pytest

from browser import CHROMIUM, SIZES, Browser
from hvtrain.report import commands, page
from hvtrain.report.run_files import read_run
from run_folders import CONFIG, write_run

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium; scripts/install-test-tools installs it"
)


@pytest.fixture(scope="module")
def browser():
    with Browser() as chrome:
        yield chrome


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    log = "2026-11-24 10:00:01,000 WARNING hvtrain.x: " + "the disk is slow " * 30 + "\n"
    first = write_run(
        folder / "a_run_with_a_long_name_that_does_not_break_anywhere_at_all", log=log
    )
    second = write_run(
        folder / "wide", config={**CONFIG, "seed": 2}, metrics={"test_accuracy": 0.5}
    )
    third = write_run(folder / "narrow", finished=False)
    page.write_report(first)
    runs = [read_run(path) for path in (first, second, third)]
    (folder / "comparison.html").write_text(commands.comparison_html(runs))
    (folder / "bad.html").write_text(
        "<body style='margin:0'><p style='width:3000px'>wide</p><script>console.error('no')</script>"
        "<img src='http://localhost:9/x.png'>"
    )
    return {
        "report": first / "report.html",
        "comparison": folder / "comparison.html",
        "bad": folder / "bad.html",
    }


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["report", "comparison"])
def test_nothing_is_wider_than_the_page_and_the_console_is_silent(browser, pages, name, size, dark):
    browser.problems.clear()
    browser.open(pages[name], size, dark)
    assert browser.too_wide() == []
    assert browser.evaluate("innerWidth") == SIZES[size][0]
    assert browser.evaluate("document.querySelectorAll('.chart svg').length") >= 3
    assert browser.evaluate(
        "[...document.images].every(image => image.complete && image.naturalWidth)"
    )
    assert browser.problems == []


def test_the_last_column_of_a_wide_table_can_be_reached_on_a_phone(browser, pages):
    browser.open(pages["report"], "phone")
    table = "[...document.querySelectorAll('table')].find(table => table.textContent.includes('a_long_name_11'))"
    right = f"{table}.rows[0].cells[12].getBoundingClientRect().right"
    assert browser.evaluate(right) > browser.evaluate("innerWidth")
    browser.evaluate(f"{table}.parentElement.scrollLeft = 1e6")
    assert browser.evaluate(right) <= browser.evaluate("innerWidth")


def test_curves_follow_the_mode_of_the_reader(browser, pages):
    colors = []
    for dark in (False, True):
        browser.open(pages["report"], "desktop", dark)
        script = "getComputedStyle(document.querySelector('.chart svg text')).fill"
        colors.append(
            [
                browser.evaluate(script),
                browser.evaluate("getComputedStyle(document.body).backgroundColor"),
            ]
        )
    assert colors[0][0] != colors[1][0] and colors[0][1] != colors[1][1]


def test_a_fault_of_a_page_is_seen(browser, pages):
    browser.problems.clear()
    browser.open(pages["bad"], "phone")
    assert "P." in browser.too_wide()
    assert any("no" in problem for problem in browser.problems)
    assert any("network" in problem for problem in browser.problems)


def test_a_click_sorts_the_table(browser, pages):
    browser.open(pages["comparison"], "desktop")
    column = "[...document.querySelectorAll('.sortable thead th')].findIndex(h => h.textContent === 'test_accuracy')"
    click = f"document.querySelectorAll('.sortable thead th')[{column}].firstChild.click()"
    cells = f"[...document.querySelectorAll('.sortable tbody tr')].map(row => row.cells[{column}].textContent)"
    assert browser.evaluate(cells) == ["0.97", "0.5", ""]
    for expected in (["0.5", "0.97", ""], ["0.97", "0.5", ""]):
        browser.evaluate(click)
        assert browser.evaluate(cells) == expected
