"""Hooks of ``mkdocs build`` that add files outside of docs/ to the site."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = (
    *("outputs/gallery/*.png", "normscope/models/embedded/*.md", "benchmarks/results/*.json"),
    *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md"),
)
_LINK = re.compile(r"\]\(\.\./([^)#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to outside of docs/, under their paths in the repository."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            place = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirect links that leave docs/ to the files that :func:`on_files` added, and theirs into docs/."""
    markdown = markdown.replace("](docs/", "](")
    return _LINK.sub(lambda link: f"]({link[1]}" if files.get_file_from_path(link[1]) else link[0], markdown)
