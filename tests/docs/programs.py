"""Runs the Python blocks of one page as a reader would: one after the other, in one program, in an empty folder.

A process of its own for each page (`python -m tests.docs.programs PAGE`), because pages set up frameworks that can be
set up once. A block that is said to be a file (`# shop.py`) is also saved as that file, so that later ones can import
it. Nothing is connected to before an inbox is started. Exits 1 and names the place on failure.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import ModuleType

from tests.docs.blocks import Block, blocks


def save(block: Block) -> None:
    """Keep a block that says which file it is."""
    if block.file is not None:
        path = Path(block.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)


def run(page: Path) -> int:
    """Run a page's programs; how many blocks failed."""
    program = sys.modules["snippet"] = ModuleType("snippet")
    failed = 0
    for block in blocks(page):
        if block.language != "python" or block.fragment is not None:
            continue
        save(block)
        try:
            exec(compile("\n" * block.line + block.text, str(page), "exec"), vars(program))
        except Exception:
            failed += 1
            sys.stderr.write(f"{block.place} does not run:\n{traceback.format_exc()}\n")
    return failed


if __name__ == "__main__":
    sys.path.insert(0, "")
    sys.exit(min(run(Path(sys.argv[1])), 1))
