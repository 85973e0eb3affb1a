"""Hooks of mkdocs: the site has the tree of the repository, so a link that works on a code host works there too."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
INDEX = "docs/README.md"
AROUND = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
SECTION = re.compile(r"^## (?P<title>[^\n]+)$(?P<body>.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation of the index: its sections, each with the pages that it is the first to link to. The footer
    of a page has the version."""
    found = VERSION.search((ROOT / "spmdrl/__init__.py").read_text(encoding="utf-8"))
    config.copyright = f"spmdrl {found[1] if found else ''}, Apache-2.0"
    seen = {INDEX, *AROUND}
    navigation: list[object] = [{"Overview": "README.md"}, {"All pages": INDEX}]
    for section in SECTION.finditer((ROOT / INDEX).read_text(encoding="utf-8")):
        links = _linked(INDEX, section["body"])
        if pages := [link for link in links if link.endswith(".md") and link not in seen]:
            navigation.append({section["title"]: pages})
            seen.update(pages)
    config.nav = [*navigation, {"Project": list(AROUND[1:])}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by its pages and those around them, and by what these link to."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:  # the others are the theme's
        files.remove(file)
    pages = [*AROUND, *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))]
    linked = {link for page in pages for link in _linked(page, (ROOT / page).read_text(encoding="utf-8"))}
    for name in [*pages, *sorted(linked.difference(pages))]:
        if (ROOT / name).is_file():  # mkdocs itself warns of a link to anything else
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def _linked(page: str, text: str) -> list[str]:
    """Return the links of a page's text into the repository, by paths from its root, each once and in their order."""
    found = (unquote(link) for link in LINK.findall(CODE.sub("", text)) if "://" not in link)
    paths = (posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) for link in found)
    return list(dict.fromkeys(path for path in paths if not path.startswith(("/", "../"))))
