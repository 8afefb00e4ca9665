"""The site of the documents, from the same files that GitHub shows: ``make docs``."""

from __future__ import annotations

from typing import Any

project = "sglang_fl"
author = "the sglang_fl project"
extensions = ["myst_parser"]
# The source is the repository, so that the files' own links hold.
include_patterns = ["README.md", "README_zh.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "docs/generator/*.md"]
root_doc = "docs/generator/contents"
source_suffix = {".md": "markdown"}
highlight_language = "none"
nitpicky = True
# As on GitHub: an anchor for each heading, made in the same way.
myst_heading_anchors = 4
myst_links_external_new_tab = True

templates_path = ["templates"]
html_additional_pages = {"index": "start.html"}  # leads to root_doc
html_theme = "furo"
html_title = "sglang_fl"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"top_of_page_buttons": []}


def _set_language(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Say of each page in which language it is: browsers choose fonts, line breaks and voices by that."""
    context["language"] = "zh-CN" if page.endswith("_zh") else "en"


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("html-page-context", _set_language)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
