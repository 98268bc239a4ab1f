"""The pages about claims: their programs run, and their table is the one that is made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oncehook.claims import postgres

DOCS = Path(__file__).parents[2] / "docs"


def test_the_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"```python\n(.*?)```", (DOCS / "how-to/once.md").read_text(), re.DOTALL)
    assert len(programs) == 5
    for program in programs:
        exec(compile(program, "once.md", "exec"), {"__name__": "snippet"})
    assert capsys.readouterr().out == "42 was refunded before, with another amount\nfirst\n"


def test_the_table_that_is_shown_is_the_one_that_is_made() -> None:
    (shown,) = re.findall(r"```sql\n(.*?)```", (DOCS / "explanation/claims.md").read_text(), re.DOTALL)
    made = f"{postgres.TABLE.strip()};\n{postgres.INDEX};\n".replace(" IF NOT EXISTS", "")
    assert shown == made
