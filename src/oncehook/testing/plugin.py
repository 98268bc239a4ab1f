"""The pytest plugin: fixtures `inbox`, `oncehook_inbox`, `claims` and `oncehook_store`. Every pytest on the machine
loads it.

`inbox` is a `TestInbox` in an `async def` test, whichever plugin runs that, and a `BlockingTestInbox` in a `def` test.
It lives on its test's event loop and must be stopped there, so the test function is wrapped.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from oncehook.claims import Claims
    from oncehook.testing.inbox import BlockingTestInbox, TestInbox

_TRIAL = pytest.StashKey["TestInbox"]()


@pytest.fixture
def oncehook_store(tmp_path: Path) -> str:
    """Return the store of a test's inbox: a SQLite file of its own. Override it for another store."""
    return f"sqlite:{tmp_path / 'oncehook.db'}"


@pytest.fixture
def inbox(oncehook_inbox: TestInbox | BlockingTestInbox) -> TestInbox | BlockingTestInbox:
    """Provide `oncehook_inbox` under a shorter name, which a project may use for something else."""
    return oncehook_inbox


@pytest.fixture
def oncehook_inbox(
    request: pytest.FixtureRequest, oncehook_store: str
) -> Generator[TestInbox | BlockingTestInbox, None, None]:
    """Provide an inbox under test: `use`, `send`, `drain`, `sent`, `recorded`, `clock.forward`."""
    if inspect.iscoroutinefunction(inspect.unwrap(request.function)):
        from oncehook.testing.inbox import TestInbox

        trial = request.node.stash[_TRIAL] = TestInbox(oncehook_store)
        yield trial
    else:
        from oncehook.testing.inbox import BlockingTestInbox

        blocking = BlockingTestInbox(oncehook_store)
        trial = blocking.trial
        yield blocking
        blocking.stop()
    trial.take_back()


@pytest.fixture
def claims(tmp_path: Path) -> Generator[Claims, None, None]:
    """Provide `Claims` on a SQLite file of this test alone."""
    from oncehook.claims import Claims

    made = Claims(f"sqlite:{tmp_path / 'claims.db'}")
    yield made
    made.close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Stop a coroutine test's inbox on the event loop of the coroutine."""
    trial = item.stash.get(_TRIAL, None)
    if trial is not None and isinstance(item, pytest.Function):
        item.obj = _stop_after(trial, item.obj)
    return (yield)


def _stop_after(trial: TestInbox, test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    async def run_test(*args: Any, **kwargs: Any) -> Any:
        try:
            return await test(*args, **kwargs)
        finally:
            await trial.stop()

    return run_test
