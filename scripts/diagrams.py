#!/usr/bin/env python3
"""Draw the two diagrams of docs/explanation as SVG: the data's way through the modules, and the states of a delivery.

`scripts/diagrams.py` writes them; tests/docs/test_diagrams.py holds them to the code and to what is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs/explanation"

STYLE = """
  .box { fill: #ffffff; stroke: #8a94a6; } .kept { fill: #eef4ff; stroke: #5b7fd6; } .end { fill: #f4f6f8; }
  .good { fill: #ecf8f0; stroke: #3c9a5f; } .bad { fill: #fdefee; stroke: #c8483f; }
  text { font: 13px system-ui, sans-serif; fill: #1c2430; } .title { font-weight: 600; }
  .small { font-size: 11.5px; fill: #5a6474; } .arrow { fill: none; stroke: #5a6474; stroke-width: 1.4; }
  marker path { fill: #5a6474; }
  @media (prefers-color-scheme: dark) {
    .box { fill: #1b2230; stroke: #67728a; } .kept { fill: #1a2740; stroke: #6f93ea; } .end { fill: #161b25; }
    .good { fill: #17301f; stroke: #58b97b; } .bad { fill: #3a1d1b; stroke: #e0776f; }
    text { fill: #e6eaf2; } .small { fill: #a9b2c3; } .arrow { stroke: #a9b2c3; } marker path { fill: #a9b2c3; }
  }
"""


@dataclass(frozen=True)
class Box:
    """A box with a title and up to three lines below it."""

    x: int
    y: int
    title: str
    lines: Sequence[str] = ()
    kind: str = "box"
    width: int = 180

    @property
    def height(self) -> int:
        return 30 + 16 * len(self.lines)

    def draw(self) -> str:
        middle = self.x + self.width // 2
        texts = [f'<text class="title" x="{middle}" y="{self.y + 20}" text-anchor="middle">{escape(self.title)}</text>']
        texts += [
            f'<text class="small" x="{middle}" y="{self.y + 37 + 16 * row}" text-anchor="middle">{escape(line)}</text>'
            for row, line in enumerate(self.lines)
        ]
        size = f'x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}"'
        shape = f'<rect class="box {self.kind}" {size} rx="6"/>'
        return "\n".join([shape, *texts])


@dataclass(frozen=True)
class Arrow:
    """An arrow through points, with a label at `at`."""

    points: Sequence[tuple[int, int]]
    label: str = ""
    at: tuple[int, int] = (0, 0)
    anchor: str = "middle"

    def draw(self) -> str:
        way = " ".join(f"{'M' if step == 0 else 'L'}{x} {y}" for step, (x, y) in enumerate(self.points))
        drawn = f'<path class="arrow" d="{way}" marker-end="url(#tip)"/>'
        if self.label:
            x, y = self.at
            for row, line in enumerate(self.label.split("\n")):
                place = f'x="{x}" y="{y + 15 * row}" text-anchor="{self.anchor}"'
                drawn += f'\n<text class="small" {place}>{escape(line)}</text>'
        return drawn


DATA_WAY: Sequence[Box | Arrow] = (
    Box(20, 40, "sender", ["POST /in/{source}"], "end", 150),
    Box(230, 24, "web/connection.py", ["deadlines and caps,", "reads the request"], width=170),
    Box(460, 24, "ingest.py", ["verify, split, key,", "plan deliveries by routes"], width=190),
    Box(710, 24, "store/…/writer.py", ["gathers what waits", "into one commit"], width=170),
    Arrow([(170, 63), (228, 63)]),
    Arrow([(400, 63), (458, 63)], "arrival", (429, 56)),
    Arrow([(650, 63), (708, 63)], "items", (679, 56)),
    Box(710, 150, "store/…/intake.py", ["new, duplicate, conflict", "event and deliveries kept"], "kept", 170),
    Arrow([(795, 86), (795, 148)]),
    Arrow([(708, 190), (95, 190), (95, 88)], "the answer, after the commit: 200 with the event's id", (400, 182)),
    Box(710, 280, "store/…/queue.py", ["lease, renew, settle;", "one per subject, in order"], "kept", 170),
    Arrow([(795, 212), (795, 278)], "due", (803, 250), "start"),
    Box(460, 272, "worker.py", ["takes leases, keeps them", "alive, settles in batches"], width=190),
    Arrow([(708, 300), (652, 300)], "lease", (680, 293)),
    Arrow([(652, 326), (708, 326)], "settle", (680, 342)),
    Box(230, 272, "destinations/", ["handler, http, whatsapp,", "celery, kinds of your own"], width=170),
    Arrow([(458, 300), (402, 300)], "attempt", (430, 293)),
    Arrow([(402, 326), (458, 326)], "result", (430, 342)),
    Box(20, 288, "your code", ["or another server"], "end", 150),
    Arrow([(228, 311), (172, 311)]),
    Box(230, 400, "web/, cli/", ["API, dashboard, commands"], width=170),
    Box(460, 400, "admin.py, replay.py", ["every question and act", "of people"], width=190),
    Box(710, 400, "store/…/admin.py", ["replay, discard, pause;", "read.py: lists, numbers"], "kept", 170),
    Box(20, 400, "person", ["looks, replays, discards"], "end", 150),
    Arrow([(170, 423), (228, 423)]),
    Arrow([(400, 423), (458, 423)]),
    Arrow([(650, 423), (708, 423)]),
    Arrow([(795, 398), (795, 344)], "due again", (803, 375), "start"),
)

STATES: Sequence[Box | Arrow] = (
    Box(20, 120, "accepted", ["the event is kept"], "end", 140),
    Box(240, 112, "pending", ["waits for its time,", "or behind its subject"], width=170),
    Box(560, 112, "leased", ["a worker makes", "an attempt"], width=170),
    Box(880, 30, "done", ["went well, stale", "or coalesced"], "good", 150),
    Box(880, 200, "dead", ["given up; everything", "is kept"], "bad", 150),
    Box(560, 300, "discarded", ["closed by a person"], "end", 170),
    Arrow([(160, 143), (238, 143)]),
    Arrow([(410, 130), (558, 130)], "lease", (484, 122)),
    Arrow([(558, 158), (412, 158)], "failed for now,\ngiven back, or its\nworker died", (485, 176)),
    Arrow([(730, 130), (800, 130), (800, 61), (878, 61)], "success", (808, 95), "start"),
    Arrow([(730, 158), (800, 158), (800, 231), (878, 231)], "permanent, or no attempts left", (792, 216), "end"),
    Arrow([(955, 262), (955, 323), (732, 323)], "discard", (845, 316)),
    Arrow([(880, 256), (325, 256), (325, 176)], "replay", (640, 249)),
    Arrow([(558, 323), (290, 323), (290, 176)], "replay", (420, 316)),
    Arrow([(880, 40), (325, 40), (325, 110)], "replay with force", (600, 33)),
)


def draw(parts: Sequence[Box | Arrow], width: int, height: int, title: str) -> str:
    """Return a whole SVG document, readable on light and dark pages."""
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    tip += '<path d="M0 0 L8 4 L0 8 z"/></marker>'
    drawn = [part.draw() for part in parts if isinstance(part, Arrow)]
    drawn += [part.draw() for part in parts if isinstance(part, Box)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">'
    return "\n".join([head, f"<style>{STYLE}</style>", f"<defs>{tip}</defs>", *drawn, "</svg>", ""])


DIAGRAMS = {
    "data-way.svg": draw(DATA_WAY, 900, 490, "The way of the data"),
    "states.svg": draw(STATES, 1050, 360, "The states of a delivery"),
}


def main() -> None:
    """Write both."""
    for name, text in DIAGRAMS.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
