"""Pages of the site besides docs/*.md: README.md as its first, other texts, and the API. A hook of mkdocs.

Links between pages are written for a reader of the repository; here they lead to the site's pages. What is no page of
it, such as LICENSE or a file of code, keeps its text without a link.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
TEXTS = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
}
# The public modules: what a user imports or names in a configuration.
API = {
    "keras": "hvtrain.keras",
    "hvtrain": "hvtrain",
    "data": "hvtrain.data",
    "tasks": "hvtrain.tasks",
    "models": "hvtrain.models",
    "errors": "hvtrain.errors",
    "settings": "hvtrain.config.schema",
}
ASSETS = ("iframe-worker.js", "more.css")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s:#]+)(#[\w-]+)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/."""
    for name, place in TEXTS.items():
        files.append(
            File.generated(config, place, content=linked((ROOT / name).read_text("utf-8"), ""))
        )
    for name, module in API.items():
        files.append(File.generated(config, f"api/{name}.md", content=f"::: {module}\n"))
    for name in ASSETS:
        files.append(
            File.generated(
                config, f"assets/{name}", abs_src_path=str(Path(__file__).with_name(name))
            )
        )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page of docs/ with links that lead to pages of the site."""
    return markdown if page.file.generated_by else linked(markdown, "docs")


def linked(text: str, folder: str) -> str:
    """The text, which lies in this folder of the repository, for the site.

    >>> linked("[a](docs/data.md#files), [b](LICENSE), [c](CONTRIBUTING.md)", "")
    '[a](data.md#files), b, [c](contributing.md)'
    """

    def place(match: re.Match[str]) -> str:
        mark, label, target, anchor = match.groups(default="")
        path = os.path.normpath(os.path.join(folder, target))  # noqa: PTH118  # Of a path that need not exist.
        if path in TEXTS:
            return f"{mark}[{label}]({TEXTS[path]}{anchor})"
        if path.startswith("docs/"):
            return f"{mark}[{label}]({path.removeprefix('docs/')}{anchor})"
        return label

    return LINK.sub(place, text)
