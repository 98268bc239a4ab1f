"""The fenced blocks of the documents, as values: where each stands, what it is, and why it may be only a fragment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
_FRAGMENT = re.compile(r"<!-- fragment: (?P<reason>.+?) -->\s*\Z", re.DOTALL)
_FIRST_LINE = re.compile(r"# (?P<path>[\w/]+\.py)\b")
_SENTENCE = re.compile(r"`(?P<path>[\w/]+\.py)`:\s*\Z")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    text: str
    fragment: str | None
    """Why it cannot run by itself, as the comment right before it says."""
    file: str | None = None
    """The file that it is, as its first line or the sentence before it says."""

    @property
    def place(self) -> str:
        """Where to look: page and line."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, from top to bottom."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        before = text[: found.start()]
        fragment = _FRAGMENT.search(before)
        indent = len(found["indent"])
        body = "".join(line[indent:] if line.strip() else line for line in found["text"].splitlines(keepends=True))
        reason = None if fragment is None else " ".join(fragment["reason"].split())
        named = _FIRST_LINE.match(body) or _SENTENCE.search(before)
        file = None if named is None else named["path"]
        yield Block(page, before.count("\n") + 1, found["language"].strip(), body, reason, file)


def all_blocks(*languages: str) -> list[Block]:
    """Every block of these languages, in all pages."""
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


def commands(block: Block) -> Iterator[list[str]]:
    """The command lines of a console block as words, without prompts, comments and output."""
    lines = block.text.replace("\\\n", " ").splitlines()
    prompted = any(line.startswith("$ ") for line in lines)
    for line in lines:
        if prompted and not line.startswith("$ "):
            continue
        yield from simple_commands(line.removeprefix("$ "))


def simple_commands(line: str) -> Iterator[list[str]]:
    """A shell line taken apart at pipes, semicolons and ampersands; redirections and variables are left out."""
    reader = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    reader.whitespace_split = True
    words: list[str] = []
    after_redirection = False
    for word in [*reader, ";"]:
        if set(word) <= set("|&;"):
            if words:
                yield words
            words = []
        elif set(word) <= set("<>") or after_redirection:
            after_redirection = not after_redirection
        elif words or not re.fullmatch(r"[A-Z_]+=.*", word):
            words.append(word)


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub and MyST make it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """What can be linked to inside a page."""
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)}


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Targets inside the repository that a page links to: path (empty: the page itself) and anchor."""
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text()))
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        yield path, anchor
