"""Add files outside of docs/ to the documentation site, and adapt the links to them.

The pages are written for the repository: a link from docs/workflows.md to a result of a benchmark
is `../benchmarks/results/verifiers.md`. The site has the content of docs/ at its top. A file that a
page links to has the same path there as in the repository.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"\]\(([^)#\s:]+)")  # an address without scheme and anchor
NAMED = re.compile(r"\[([\w-]+\.md)\]\(\1")  # a page under its file name


def linked_files(docs: Path) -> list[Path]:
    """List the files outside of `docs` that its pages link to, and those that they link to."""
    found: set[Path] = set()
    waiting = sorted(docs.glob("*.md"))
    while waiting:
        page = waiting.pop()
        for link in LINK.findall(page.read_text()):
            target = (page.parent / link).resolve()
            if target.is_file() and not target.is_relative_to(docs) and target not in found:
                found.add(target)
                waiting += [target] if target.suffix == ".md" else []
    return sorted(found)


def site_path(target: Path, docs: Path) -> str:
    """Return the path of a file within the site."""
    return str(target.relative_to(docs if target.is_relative_to(docs) else docs.parent))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to."""
    docs = Path(config.docs_dir).resolve()
    for target in linked_files(docs):
        files.append(File.generated(config, site_path(target, docs), abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the links of a page of the repository by those of the site, with titles of pages."""
    docs = Path(config.docs_dir).resolve()
    source = Path(str(page.file.abs_src_path))
    folder = os.path.dirname(page.file.src_uri)

    def adapted(match: re.Match[str]) -> str:
        target = (source.parent / match[1]).resolve()
        if not target.is_file():
            return match[0]
        return "](" + os.path.relpath(site_path(target, docs), folder or ".")

    def titled(match: re.Match[str]) -> str:
        title = (source.parent / match[1]).read_text().partition("\n")[0].removeprefix("# ")
        return f"[{title}]({match[1]}"

    return LINK.sub(adapted, NAMED.sub(titled, markdown))
