"""How Sphinx builds these pages: MyST reads the Markdown, Furo shows it. Run by `scripts/docs`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

project = "oncehook"
author = "The oncehook authors"
copyright = author  # noqa: A001 - Sphinx's word
release = re.findall(r'^__version__ = "(.+)"$', (ROOT / "src/oncehook/__init__.py").read_text(), re.MULTILINE)[0]

extensions = ["myst_parser", "sphinx_copybutton"]
copybutton_prompt_text = "$ "  # blocks with prompts: commands are copied, without prompts, and their output is not
copybutton_line_continuation_character = "\\"
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"oncehook {release}"
html_logo = "../src/oncehook/web/static/img/mark.svg"
html_favicon = "../src/oncehook/web/static/img/mark.svg"
html_static_path = ["_static"]
html_css_files = ["oncehook.css"]
html_extra_path = ["llms.txt"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}

pygments_style = "friendly"
pygments_dark_style = "github-dark"
highlight_language = "text"

nitpicky = True


def follow_links(app: Any, page: str, source: list[str]) -> None:
    """Links that a repository's reader can follow: files outside these pages become downloads, folders their index."""
    folder = (ROOT / "docs" / page).parent

    def followed(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if target.is_file() and not target.is_relative_to(ROOT / "docs"):
            return f"](path:{link[1]})"
        return f"]({link[1].rstrip('/')}/index.md)" if (target / "index.md").is_file() else link[0]

    source[0] = re.sub(r"\]\((\.\./[^)#]+)\)", followed, source[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", follow_links)
