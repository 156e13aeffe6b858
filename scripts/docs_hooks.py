"""Hooks of ``mkdocs build``: add files outside of docs/ to the site, and convert docstrings."""

import re
from pathlib import Path
from textwrap import indent
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = ("outputs/gallery/*.png", "normscope/models/embedded/*.md", "CHANGELOG.md", "benchmarks/results/*.json")
_LINK = re.compile(r"\]\(\.\./((?:outputs/gallery|normscope/models/embedded|benchmarks/results)/[^)]+|CHANGELOG\.md)\)")
_ROLE = re.compile(r":(?:func|class|mod|attr|meth|data):`~?([^`]+)`")
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add figures, results, cards of the embedded networks and the changelog, under their paths in the repository."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            place = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links that leave docs/ to what :func:`on_files` has added."""
    return _LINK.sub(r"](\1)", markdown)


class Docstrings(Extension):
    """Docstrings as the site takes them: doctests as examples, and names without Sphinx's roles."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite what was collected of one function, class or module."""
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _DOCTEST.sub(lambda match: "Examples:\n" + indent(match[0], "    "), text)
