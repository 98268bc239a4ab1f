"""A body for people: a tree, text, hexadecimal, and the difference between two bodies.

Bytes come in; rows and nested nodes go out, which templates write as escaped text. At most 200 KB are shown, whatever
the body contains (S30).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from oncehook import payload

SHOWN: Final = 200 * 1024
HEX_SHOWN: Final = 16 * 1024
NODES: Final = 3000
"""Values of a tree at most, because browsers become slow with more."""
LINES: Final = 4000
TEXT: Final = 2000
OPEN_DEPTH: Final = 12


@dataclass(slots=True)
class Node:
    name: str
    kind: str
    """`s` text, `n` number and the like, `o` object, `a` array."""
    text: str = ""
    children: list[Node] = field(default_factory=list)
    is_open: bool = False
    is_redacted: bool = False

    @property
    def hint(self) -> str:
        """Return the summary of a closed object or array."""
        if self.kind == "a":
            return f"[ {self.text} ]"
        return f"{{ {self.text} }}"


@dataclass(slots=True)
class _Budget:
    left: int


def tree(body: bytes) -> tuple[Node, bool] | None:
    """Return the tree of a JSON or form body and whether it is complete; None when it is neither."""
    if len(body) > 4 * SHOWN:
        return None
    try:
        value = payload.parse(body)
    except payload.Unreadable:
        value = _form(body)
        if value is None:
            return None
    budget = _Budget(NODES)
    return _node("", value, 0, budget), budget.left > 0


def _form(body: bytes) -> dict[str, str] | None:
    text = body.decode("utf-8", "replace")
    if "=" not in text or "\n" in text or " " in text:
        return None
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=200))
    except ValueError:
        return None


def _node(name: str, value: Any, depth: int, budget: _Budget) -> Node:
    budget.left -= 1
    if isinstance(value, dict | list):
        pairs: Iterator[tuple[str, Any]] = (
            iter(value.items()) if isinstance(value, dict) else ((str(n), item) for n, item in enumerate(value))
        )
        node = Node(name, "o" if isinstance(value, dict) else "a", str(len(value)), is_open=depth < OPEN_DEPTH)
        for key, item in pairs:
            if budget.left <= 0:
                break
            node.children.append(_node(key, item, depth + 1, budget))
        return node
    if isinstance(value, str):
        cut = value if len(value) <= TEXT else value[:TEXT] + "…"
        return Node(name, "s", msgspec.json.encode(cut).decode(), is_redacted=value == payload.REDACTED)
    return Node(name, "n", msgspec.json.encode(value).decode())


def raw(body: bytes) -> tuple[str, bool]:
    """Return the body as text, and whether it is complete. Bytes that are no text are shown escaped."""
    return body[:SHOWN].decode("utf-8", "replace"), len(body) <= SHOWN


def dump(body: bytes) -> tuple[list[tuple[str, str, str]], bool]:
    """Return lines of offset, sixteen bytes and their characters, and whether they are complete."""
    part = body[:HEX_SHOWN]
    rows = []
    for start in range(0, len(part), 16):
        piece = part[start : start + 16]
        digits = " ".join(f"{byte:02x}" for byte in piece)
        spelled = "".join(chr(byte) if 32 <= byte < 127 else "·" for byte in piece)
        rows.append((f"{start:08x}", digits, spelled))
    return rows, len(body) <= HEX_SHOWN


# -- differences -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DiffLine:
    kind: str
    """`same`, `add`, `del`, or `skip` for equal lines that are left out."""
    number: int | None
    text: str

    @property
    def sign(self) -> str:
        return {"add": "+", "del": "−", "skip": "⋯"}.get(self.kind, "")


def differences(first: bytes, other: bytes, around: int = 3) -> list[DiffLine]:
    """Return the differences of two bodies, sorted and indented where they are JSON."""
    before, after = _lines(first), _lines(other)
    found: list[DiffLine] = []
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=len(before) > 500)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            found += _alike(before[a:b], c, around, is_first=a == 0, is_last=b == len(before))
        else:
            found += [DiffLine("del", n + 1, before[n]) for n in range(a, b)]
            found += [DiffLine("add", n + 1, after[n]) for n in range(c, d)]
    return found[:LINES]


def _alike(lines: Sequence[str], start: int, around: int, *, is_first: bool, is_last: bool) -> list[DiffLine]:
    head, tail = (0 if is_first else around), (0 if is_last else around)
    if len(lines) <= head + tail + 1:
        return [DiffLine("same", start + n + 1, line) for n, line in enumerate(lines)]
    skipped = len(lines) - head - tail
    shown = [DiffLine("same", start + n + 1, lines[n]) for n in range(head)]
    shown.append(DiffLine("skip", None, f"{skipped} lines alike"))
    first_of_tail = len(lines) - tail
    return shown + [DiffLine("same", start + n + 1, lines[n]) for n in range(first_of_tail, len(lines))]


def _lines(body: bytes) -> list[str]:
    part = body[:SHOWN]
    try:
        value = payload.parse(part)
    except payload.Unreadable:
        return part.decode("utf-8", "replace").splitlines()[:LINES]
    sorted_ = msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2)
    return sorted_.decode().splitlines()[:LINES]
