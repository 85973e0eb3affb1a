"""The site of the documentation: it builds without a warning, has every page, and asks the network for nothing."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from spmdrl import __version__
from tests.helpers.site import ROOT, build_site

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")

FETCHED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
REFERENCES = {"canonical", "alternate"}  # links that a browser does not fetch
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]


class Elements(HTMLParser):
    """The elements of a page with their attributes."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build_site(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Elements]:
    found = {page.relative_to(site).as_posix(): Elements(page) for page in site.rglob("*.html")}
    del found["404.html"]  # only a server shows it
    return found


def built(page: str) -> str:
    """The file that mkdocs makes of a page."""
    return page.replace("README.md", "index.md").replace(".md", ".html")


def test_every_page_is_built_and_can_be_searched(site: Path, pages: dict[str, Elements]) -> None:
    assert pages.keys() >= {built(page) for page in PAGES}
    assert f"spmdrl {__version__}, Apache-2.0" in (site / "index.html").read_text(encoding="utf-8")
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    assert {place["location"].partition("#")[0] for place in index["docs"]} >= {built(page) for page in PAGES}


def test_every_page_is_in_the_navigation(pages: dict[str, Elements]) -> None:
    links = {
        (Path("/docs") / attributes["href"].partition("#")[0]).resolve().as_posix().lstrip("/")
        for tag, attributes in pages["docs/faults.html"].found
        if tag == "a" and "md-nav__link" in (attributes.get("class") or "") and attributes.get("href")
    }
    assert links >= {built(page) for page in PAGES}


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[str, Elements]) -> None:
    """Neither by a page nor by a style sheet; for scripts the pages' policy says so to the browser."""
    for name, page in pages.items():
        for tag, attributes in page.found:
            address = attributes.get(FETCHED.get(tag, "")) or ""
            if attributes.get("rel") not in REFERENCES:
                assert "//" not in address, f"{name}: {tag} {address}"
                assert (site / name).parent.joinpath(address).exists() or ":" in address, f"{name}: {tag} {address}"
        policies = [content["content"] for tag, content in page.found if tag == "meta" and "http-equiv" in content]
        assert policies and all("default-src 'self' file:;" in (policy or "") for policy in policies), name
        assert not any("mermaid" in (attributes.get("class") or "") for _, attributes in page.found), name
    for sheet in site.rglob("*.css"):
        assert "url(http" not in sheet.read_text(encoding="utf-8"), sheet.name


def test_each_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(ROOT / "docs", root / "docs")
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks", "configs", "spmdrl"):
        (root / name).symlink_to(ROOT / name)
    wrong = ["no-such-page.md", "faults.md#no-such-heading", "/faults.md"]
    with (root / "docs/packing.md").open("a", encoding="utf-8") as page:
        page.write("".join(f"\n[x]({link})\n" for link in wrong))
    done = build_site(tmp_path / "site", root=root)
    assert done.returncode != 0
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == len(wrong)
    assert all(any(link in line for line in warnings) for link in wrong), warnings
