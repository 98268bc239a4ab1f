"""Every promise has a test, every number a promise, every threat both (S41); the page is docs/promises.md."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHECK: dict[str, Any] = runpy.run_path(str(ROOT / "scripts/promises.py"))
PAGE = (ROOT / "docs/promises.md").read_text()
SECURITY = (ROOT / "SECURITY.md").read_text()


def test_every_promise_has_tests_that_exist() -> None:
    assert not list(CHECK["check_promises"](CHECK["promises"]()))


def test_every_number_is_a_promise_and_every_promise_is_used() -> None:
    assert not list(CHECK["check_numbers"](CHECK["promises"](), CHECK["named"]()))


def test_every_threat_names_promises_and_tests() -> None:
    assert len(CHECK["threats"]()) >= 10
    assert not list(CHECK["check_threats"](CHECK["threats"]()))


def test_the_check_sees_what_is_wrong() -> None:
    def wrong(page: str) -> list[str]:
        return list(CHECK["check_promises"](CHECK["promises"](page)))

    assert any("R1 names" in one for one in wrong(PAGE.replace("test_kill_at_a_named_point", "test_nobody", 1)))
    assert any("R22 has no test" in one for one in wrong(PAGE.replace("[`test_a_copy_revives", "[`a_copy_revives")))
    assert any("S9" in one for one in wrong(PAGE.replace("- **S9** ", f"- **S{42}** ")))
    number = f"R{78}"  # not written out: this file is looked at, too
    used = {**CHECK["named"](), number: {ROOT / "src/oncehook/inbox.py"}}
    assert f"{number} is no promise: src/oncehook/inbox.py" in CHECK["check_numbers"](CHECK["promises"](), used)
    unused = {name: paths for name, paths in CHECK["named"]().items() if name != "S9"}
    assert "S9 is named in neither src nor tests." in CHECK["check_numbers"](CHECK["promises"](), unused)
    empty = CHECK["threats"](SECURITY.replace("[`test_", "[`"))
    assert list(CHECK["check_threats"](empty))
