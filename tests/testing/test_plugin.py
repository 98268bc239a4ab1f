"""The pytest plugin as a user's project has it: other processes, other async plugins, nothing of ours around it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from oncehook.testing import TestInbox

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/testing.md"

COROUTINE = """
async def test_paid(inbox):
    seen = []

    @inbox.on("stripe")
    async def book(event):
        seen.append(event.attempt)

    await inbox.send("stripe", "invoice.paid")
    await inbox.drain()
    assert seen == [1]
"""

FUNCTION = """
def test_paid(inbox):
    seen = []
    inbox.on("stripe", name="book")(lambda event: seen.append(event.attempt))
    inbox.send("stripe", "invoice.paid")
    inbox.drain()
    assert seen == [1]
"""

SETTINGS = """
[pytest]
filterwarnings =
    error
    # pytest-asyncio wants that said; where it is turned off, pytest does not know the setting
    ignore:The configuration option .asyncio_default_fixture_loop_scope:pytest.PytestDeprecationWarning
"""


def run(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """pytest in a folder of its own, with the entry point that is installed and without our settings."""
    (folder / "test_it.py").write_text(code)
    (folder / "pytest.ini").write_text(SETTINGS)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    arguments = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_it.py"]
    return subprocess.run(arguments, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def good(ran: subprocess.CompletedProcess[str], passed: int) -> bool:
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return f"{passed} passed" in ran.stdout


def test_under_pytest_asyncio(tmp_path: Path) -> None:
    assert good(run(tmp_path, COROUTINE, "-p", "no:anyio", "-o", "asyncio_mode=auto"), 1)


def test_under_pytest_asyncio_that_is_strict(tmp_path: Path) -> None:
    code = "import pytest\n\n\n@pytest.mark.asyncio" + COROUTINE
    assert good(run(tmp_path, code, "-p", "no:anyio"), 1)


def test_under_anyio(tmp_path: Path) -> None:
    code = "import pytest\n\n\n@pytest.fixture\ndef anyio_backend():\n    return 'asyncio'\n\n\n@pytest.mark.anyio"
    assert good(run(tmp_path, code + COROUTINE, "-p", "no:asyncio"), 1)


def test_under_none_of_them_a_plain_function_works(tmp_path: Path) -> None:
    assert good(run(tmp_path, FUNCTION, "-p", "no:anyio", "-p", "no:asyncio"), 1)


def test_each_test_has_a_store_and_a_time_of_its_own(tmp_path: Path) -> None:
    code = """
import datetime, pytest

@pytest.mark.parametrize("turn", [1, 2])
async def test_fresh(inbox, turn):
    late = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    assert inbox.clock.now() < late
    inbox.on("stripe", name="book")(print)
    inbox.source("stripe", verify="none", key="$.id")
    assert (await inbox.send("stripe", body={"id": 1})).json()["status"] == "accepted"
    inbox.clock.forward("10d")

async def test_failing(inbox):
    inbox.clock.forward("10d")
    await inbox.send("stripe")
    assert False

def test_after_it(inbox):
    late = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    assert inbox.clock.now() < late
"""
    ran = run(tmp_path, code, "-o", "asyncio_mode=auto")
    assert "3 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "1 failed" in ran.stdout
    assert "error" not in ran.stdout.splitlines()[-1]  # a test that fails leaves nothing behind


def test_its_inbox_is_stopped_when_a_test_is_over(tmp_path: Path) -> None:
    """Also after a failure: else the next one could not have the same file, which one process writes."""
    code = f"""
import pytest, threading

@pytest.fixture
def oncehook_store():
    return "sqlite:{tmp_path}/same.db"

@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.xfail(strict=True, raises=ZeroDivisionError)
async def test_failing(inbox, turn):
    await inbox.send("stripe")
    1 / 0

def test_without_await(inbox):
    inbox.send("stripe")

def test_after_them():
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("oncehook")]
"""
    ran = run(tmp_path, code, "-o", "asyncio_mode=auto")
    assert good(ran, 2)
    assert "2 xfailed" in ran.stdout


def test_another_store_is_one_fixture_away(tmp_path: Path) -> None:
    code = f"""
import pytest

@pytest.fixture
def oncehook_store():
    return "sqlite:{tmp_path}/mine.db"
""" + FUNCTION  # fmt: skip
    assert good(run(tmp_path, code), 1)
    assert (tmp_path / "mine.db").exists()


def test_claims_are_cleared_between_tests(tmp_path: Path) -> None:
    code = """
import pytest

@pytest.mark.parametrize("turn", [1, 2])
def test_new(claims, turn):
    assert claims.claim("refund:42", ttl="30s").status == "new"
    assert claims.claim("refund:42", ttl="30s").status == "in_progress"
"""
    assert good(run(tmp_path, code), 2)


def test_a_project_that_does_not_use_it_pays_nothing(tmp_path: Path) -> None:
    code = """
import sys

def test_nothing_was_imported():
    heavy = {"oncehook.inbox", "oncehook.testing.inbox", "msgspec", "aiohttp", "starlette", "sqlite3", "cryptography"}
    assert "oncehook.testing.plugin" in sys.modules
    assert not heavy & sys.modules.keys()
"""
    others = ("schemathesis", "hypothesispytest", "valkey", "anyio", "asyncio", "xdist", "xdist.looponfail", "timeout")
    options = [option for name in others for option in ("-p", f"no:{name}")]
    assert good(run(tmp_path, code, *options), 1)


def test_the_page_is_true(tmp_path: Path) -> None:
    """Its Python blocks are one module after the other: `shop.py`, and tests."""
    shop, *blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "shop.py").write_text(shop)
    tests = sum(len(re.findall(r"^(?:async )?def test_", block, re.MULTILINE)) for block in blocks)
    assert tests >= 4
    code = "\n\n".join(blocks)
    assert good(run(tmp_path, code, "-o", "asyncio_mode=auto", "-o", "pythonpath=."), tests)


async def test_it_is_here_as_well(inbox: TestInbox) -> None:
    assert isinstance(inbox, TestInbox)


@pytest.fixture
async def started(inbox: TestInbox) -> TestInbox:
    """A fixture of one's own that is a coroutine: on the loop of the test."""
    await inbox.start()
    return inbox


async def test_a_fixture_may_start_it(started: TestInbox) -> None:
    assert await started.troubles() == {}
