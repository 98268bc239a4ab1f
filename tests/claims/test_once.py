"""`@once`: functions, methods and coroutines that are run once for each key, on every backend."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

import oncehook
from oncehook import ClaimLost, InProgress, once
from oncehook.claims import Claims
from oncehook.claims.client import MAX_RESULT
from oncehook.errors import ConfigError, KeyMissing, PayloadMismatch, ResultInvalid, StoreUnavailable
from tests.claims.conftest import wait_for_renewals
from tests.servers import fresh_schema, shared_postgres


@dataclasses.dataclass
class Order:
    id: Any
    amount: int = 10


@dataclasses.dataclass
class Receipt:
    order: str
    at: datetime


class Effects(list[Any]):
    """What really happened."""


@pytest.fixture
def effects() -> Effects:
    return Effects()


# -- results -----------------------------------------------------------------------------------


def test_the_second_call_gets_the_first_ones_result(store: str, key: str, effects: Effects) -> None:
    @once(key=lambda order: order.id, store=store, keep="24h")
    def charge(order: Order) -> dict[str, Any]:
        """Charge."""
        effects.append(order.id)
        return {"charged": order.amount, "number": len(effects)}

    assert [charge(Order(key)) for _ in range(3)] == [{"charged": 10, "number": 1}] * 3
    assert charge(Order(key + "x"))["number"] == 2
    assert effects == [key, key + "x"]
    assert (charge.__name__, charge.__doc__) == ("charge", "Charge.")


async def test_coroutines_too(store: str, key: str, effects: Effects) -> None:
    @once(key="order.id", store=store)
    async def charge(order: Order) -> int:
        effects.append(order.id)
        await asyncio.sleep(0)
        return len(effects)

    assert asyncio.iscoroutinefunction(charge)
    assert [await charge(Order(key)) for _ in range(3)] == [1, 1, 1]


def test_methods_too(store: str, key: str, effects: Effects) -> None:
    class Shop:
        @once(key=lambda self, order: order.id, store=store)
        def charge(self, order: Order) -> str:
            effects.append(order.id)
            return "charged"

        @once(key="order_id", store=store)
        async def ship(self, order_id: str, express: bool = False) -> bool:
            effects.append(order_id)
            return express

        @classmethod
        @once(key="order_id", store=store)
        def of(cls, order_id: str) -> str:
            return cls.__name__

    assert [Shop().charge(Order(key)) for _ in range(2)] == ["charged"] * 2
    assert [asyncio.run(Shop().ship(order_id=key, express=True)) for _ in range(2)] == [True, True]
    assert [Shop.of(key) for _ in range(2)] == ["Shop"] * 2
    assert effects == [key, key], "the same key of two functions is two keys"


def test_first_and_later_callers_get_the_same(store: str, key: str) -> None:
    """By the annotation where there is one, as plain JSON where there is none."""
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    @once(key="order", store=store)
    def typed(order: str) -> Receipt:
        return Receipt(order, at)

    @once(key="order", store=store)
    def plain(order: str):  # type: ignore[no-untyped-def]
        return (order, at)

    @once(key="order", store=store)
    def wrong(order: str) -> int:
        return order  # type: ignore[return-value]

    @once(key="order", store=store)
    def nothing(order: str) -> None:
        return None

    for _ in range(2):
        assert typed(key) == Receipt(key, at)
        assert plain(key) == [key, "2026-01-02T03:04:05Z"]  # type: ignore[no-untyped-call]
        assert wrong(key) == key  # type: ignore[comparison-overlap]
        assert nothing(key) is None


@pytest.mark.parametrize("bad", [object(), b"x" * MAX_RESULT, "x" * MAX_RESULT], ids=["object", "bytes", "text"])
def test_a_result_that_cannot_be_kept_is_said_at_once_and_the_work_is_not_repeated(
    store: str, key: str, effects: Effects, bad: object
) -> None:
    @once(key="order", store=store)
    def charge(order: str) -> Any:
        effects.append(order)
        return bad

    for _ in range(3):
        with pytest.raises(ResultInvalid):
            charge(key)
    assert effects == [key]


# -- in progress, errors -----------------------------------------------------------------------


def test_meanwhile_it_is_in_progress(store: str, key: str) -> None:
    inside, go_on = threading.Event(), threading.Event()

    @once(key="order", store=store, ttl="20s")
    def charge(order: str) -> str:
        inside.set()
        go_on.wait()
        return "charged"

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(charge, key)
        inside.wait()
        with pytest.raises(InProgress) as busy:
            charge(key)
        go_on.set()
        assert first.result() == charge(key) == "charged"
    assert busy.value.retry_after is not None
    assert 10 < busy.value.retry_after <= 20


def test_of_many_threads_one_runs_it(store: str, key: str, effects: Effects) -> None:
    @once(key="order", store=store)
    def charge(order: str) -> int:
        effects.append(order)
        time.sleep(0.2)
        return len(effects)

    barrier = threading.Barrier(16)

    def call(_: int) -> str:
        barrier.wait()
        try:
            return str(charge(key))
        except InProgress:
            return "in progress"

    with ThreadPoolExecutor(16) as pool:
        answers = Counter(pool.map(call, range(16)))
    assert effects == [key]
    assert set(answers) <= {"1", "in progress"}


async def test_of_many_tasks_one_runs_it(store: str, key: str, effects: Effects) -> None:
    @once(key="order", store=store)
    async def charge(order: str) -> int:
        effects.append(order)
        await asyncio.sleep(0.2)
        return len(effects)

    answers = await asyncio.gather(*(charge(key) for _ in range(50)), return_exceptions=True)
    assert effects == [key]
    assert {type(answer) for answer in answers} <= {int, InProgress}


@pytest.mark.usefixtures("often")
def test_it_is_renewed_while_the_function_runs(store: str, key: str, claims: Claims) -> None:
    @once(key="order", store=store, ttl=20, name="charge")
    def charge(order: str) -> str:
        wait_for_renewals(claims, f"charge:{order}")
        with pytest.raises(InProgress):
            charge(order)
        return "charged"

    assert charge(key) == "charged"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_releases_it(store: str, key: str, effects: Effects, error: type[BaseException]) -> None:
    @once(key="order", store=store)
    def charge(order: str) -> str:
        effects.append(order)
        if len(effects) == 1:
            raise error("no")
        return "charged"

    with pytest.raises(error):
        charge(key)
    assert charge(key) == charge(key) == "charged"
    assert len(effects) == 2


async def test_an_exception_or_a_cancel_releases_it_on_an_event_loop(store: str, key: str, effects: Effects) -> None:
    inside = asyncio.Event()

    @once(key="order", store=store)
    async def charge(order: str) -> str:
        effects.append(order)
        if len(effects) == 1:
            raise ValueError
        if len(effects) == 2:
            inside.set()
            await asyncio.sleep(600)
        return "charged"

    with pytest.raises(ValueError):  # noqa: PT011
        await charge(key)
    task = asyncio.create_task(charge(key))
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await charge(key) == "charged"


def test_a_nested_once_is_not_mistaken(store: str, key: str) -> None:
    @once(key="order", store=store)
    def inner(order: str) -> str:
        return outer(order)

    @once(key="order", store=store)
    def outer(order: str) -> str:
        return inner(order)

    with pytest.raises(InProgress):
        outer(key)


def test_a_claim_that_was_lost_is_said(store: str, key: str, claims: Claims) -> None:
    @once(key="order", store=store, name="charge")
    def charge(order: str) -> str:
        claims.forget(f"charge:{order}")
        return "charged"

    with pytest.raises(ClaimLost):
        charge(key)
    assert claims.look(f"charge:{key}") is None


# -- keys and payloads -------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [None, "", [], (), {}, True, 1.5, b"x", ("a", None)])
def test_a_missing_key_is_an_error(tmp_path: Path, effects: Effects, missing: object) -> None:
    @once(key="order.id", store=f"sqlite:{tmp_path}/c.db")
    def charge(order: Order) -> None:
        effects.append(order)

    with pytest.raises(KeyMissing):
        charge(Order(missing))
    assert not effects


@pytest.mark.parametrize(
    "rule",
    ["order.number", "order.id.x", lambda order: order["id"], lambda order: order.number],
    ids=["no field", "no field of a text", "no item", "no attribute"],
)
def test_a_path_that_leads_nowhere_is_a_missing_key(tmp_path: Path, effects: Effects, rule: Any) -> None:
    @once(key=rule, store=f"sqlite:{tmp_path}/c.db")
    def charge(order: Any) -> None:
        effects.append(order)

    with pytest.raises(KeyMissing):
        charge({"name": "no id"})
    assert not effects


def test_keys_by_name_path_and_parts(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/c.db"
    number = UUID(int=7)

    def seen(rule: Any, *args: Any, **kwargs: Any) -> str:
        @once(key=rule, store=url, name="f")
        def function(order: Any, *rest: Any, tenant: str = "acme") -> None:
            return None

        with Claims(url) as claims:
            before = set(names(tmp_path))
            function(*args, **kwargs)
            claims.look("x")
            return (set(names(tmp_path)) - before).pop()

    assert seen("order", 42) == "f:42"
    assert seen("order.id", {"id": number}) == f"f:{number}"
    assert seen("order.lines.1.sku", {"lines": [{}, {"sku": "b"}]}) == "f:b"
    assert seen("tenant", None) == "f:acme"
    assert seen(lambda order, *rest, tenant: (tenant, order), 7) == 'f:["acme","7"]'
    assert seen(lambda order, *rest, tenant: (tenant, order), "c", tenant="ab") == 'f:["ab","c"]'
    assert seen(lambda order, *rest, tenant: (tenant, order), "bc", tenant="a") == 'f:["a","bc"]'
    assert seen(lambda order, *rest, tenant: rest[0], 1, "r") == "f:r"


def names(folder: Path) -> Iterator[str]:
    import sqlite3

    if not (folder / "c.db").exists():
        return
    with contextlib.closing(sqlite3.connect(folder / "c.db")) as connection:
        yield from (name for (name,) in connection.execute("SELECT key FROM oncehook_claims"))


def test_another_payload_under_the_same_key_is_an_error_when_asked(store: str, key: str, effects: Effects) -> None:
    @once(key="order.id", payload="order", store=store)
    def strict(order: Order) -> str:
        effects.append(order)
        return "charged"

    @once(key="order.id", store=store)
    def lax(order: Order) -> str:
        return "charged"

    assert strict(Order(key, 10)) == strict(Order(key, 10))
    with pytest.raises(PayloadMismatch):
        strict(Order(key, 20))
    assert len(effects) == 1
    assert lax(Order(key, 10)) == lax(Order(key, 20))


def test_wrong_arguments_are_the_functions_own_error(tmp_path: Path) -> None:
    @once(key="order", store=f"sqlite:{tmp_path}/c.db")
    def charge(order: str) -> None: ...

    with pytest.raises(TypeError, match="order"):
        charge()  # type: ignore[call-arg]


# -- decoration --------------------------------------------------------------------------------


def generator(order: str) -> Iterator[str]:
    yield order


async def async_generator(order: str) -> Any:
    yield order


@pytest.mark.parametrize(
    "function",
    [generator, async_generator, staticmethod(len), classmethod(len), Order, lambda order: 1, 42],
    ids=["generator", "async generator", "static", "class method", "class", "lambda", "no function"],
)
def test_what_cannot_be_decorated_is_refused_at_once(function: Any) -> None:
    with pytest.raises(ConfigError):
        once(key="order")(function)


def test_settings_are_looked_at_when_decorating() -> None:
    def charge(order: str) -> None: ...

    for wrong in ({"key": "oder"}, {"key": "order", "ttl": "soon"}, {"key": "order", "keep": 0}):
        with pytest.raises(ConfigError):
            once(**wrong)(charge)  # type: ignore[arg-type]


def test_a_coroutine_that_nobody_runs_is_refused(store: str, key: str) -> None:
    async def real() -> str:
        return "x"

    @once(key="order", store=store)
    def charge(order: str) -> Any:
        return real()

    for _ in range(2):
        with pytest.raises(ConfigError, match="coroutine"):
            charge(key)


def test_the_environment_names_a_store(tmp_path: Path, effects: Effects, monkeypatch: pytest.MonkeyPatch) -> None:
    @once(key="order")
    def charge(order: str) -> None:
        effects.append(order)

    monkeypatch.setenv("ONCEHOOK_CLAIMS", f"sqlite:{tmp_path}/c.db")
    charge("1")
    charge("1")
    assert effects == ["1"]
    assert (tmp_path / "c.db").exists()


WITHOUT_A_STORE = """
import asyncio
from oncehook import once
from oncehook.claims import DedupLock
from oncehook.errors import KeyMissing

@once(key=lambda order: f"charge:{order['id']}", keep="24h")
def charge(order): print("charged"); return {"paid": order["id"]}

@once(key=lambda order: f"refund:{order['id']}", keep="24h")
async def refund(order): print("refunded"); return {"back": order["id"]}

print(charge({"id": 7}), asyncio.run(refund({"id": 7})))
DedupLock("wamid.1").acquire()
try:
    charge({})
except KeyMissing:
    print("no key")
"""
ONCE, AGAIN = "charged\nrefunded\n", "{'paid': 7} {'back': 7}\nno key\n"


def fresh(folder: Path, **env: str) -> str:
    """What the program says in a process of its own, without any setup but this."""
    (folder / "shop.py").write_text(WITHOUT_A_STORE)
    ours = {name: value for name, value in os.environ.items() if not name.startswith("ONCEHOOK_")}
    command = [sys.executable, "shop.py"]
    done = subprocess.run(command, cwd=folder, env={**ours, **env}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.rglob("*.db")}


def test_without_a_store_and_without_settings(tmp_path: Path) -> None:
    assert fresh(tmp_path) == ONCE + AGAIN
    assert fresh(tmp_path) == AGAIN, "another process finds what the first has kept"
    assert files(tmp_path) == {"oncehook-claims.db"}, "the inbox's own file is not touched"


def test_without_a_store_the_settings_lead_to_one(tmp_path: Path) -> None:
    settings = 'store = "sqlite:./inbox.db"\n[[route]]\nfrom = "app"\nto = "a_handler"\n'
    settings += '[source.orders]\npreset = "stripe"\nsecret = { env = "NOT_SET" }\n'
    (tmp_path / "oncehook.toml").write_text(settings)
    assert fresh(tmp_path) == ONCE + AGAIN
    assert files(tmp_path) == {"inbox-claims.db"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "prod.toml").write_text('store = "sqlite:./other/prod.db"')
    assert fresh(tmp_path, ONCEHOOK_CONFIG="other/prod.toml") == ONCE + AGAIN
    assert fresh(tmp_path, ONCEHOOK_STORE="sqlite:./mine.db") == ONCE + AGAIN
    assert fresh(tmp_path, ONCEHOOK_CLAIMS="sqlite:./claims.db") == ONCE + AGAIN
    assert files(tmp_path) == {"inbox-claims.db", "prod-claims.db", "mine-claims.db", "claims.db"}


def test_without_a_store_beside_an_inbox_on_postgresql(tmp_path: Path) -> None:
    url = f"{shared_postgres().url}?schema={(schema := fresh_schema())}"
    with psycopg.connect(shared_postgres().url, autocommit=True) as connection:
        connection.execute(f'CREATE SCHEMA "{schema}"')
    assert fresh(tmp_path, ONCEHOOK_STORE=url) == ONCE + AGAIN
    assert fresh(tmp_path, ONCEHOOK_STORE=url) == AGAIN
    assert not files(tmp_path)


def test_a_store_that_is_away(tmp_path: Path, effects: Effects) -> None:
    (tmp_path / "file").write_text("")
    away = f"sqlite:{tmp_path}/file/c.db"

    def charge(order: str) -> int:
        effects.append(order)
        return len(effects)

    with pytest.raises(StoreUnavailable):
        once(key="order", store=away)(charge)("1")
    assert not effects
    opened = once(key="order", store=away, fail_open=True)(charge)
    assert [opened("1"), opened("1")] == [1, 2]


def test_a_store_that_goes_away_meanwhile(tmp_path: Path, effects: Effects) -> None:
    """The effect has happened: closed raises, open warns."""

    def spoil(order: str) -> str:
        effects.append(order)
        (tmp_path / order).rename(tmp_path / f"{order}.moved")
        (tmp_path / order).write_text("")
        return "charged"

    def decorated(name: str, **settings: Any) -> Callable[[str], str]:
        return once(key="order", store=f"sqlite:{tmp_path}/{name}/c.db", ttl=0.5, **settings)(spoil)

    with pytest.raises(StoreUnavailable):
        decorated("closed")("closed")
    assert decorated("open", fail_open=True)("open") == "charged"


def test_once_is_the_function_however_it_is_imported() -> None:
    code = (
        "import oncehook.claims.once, oncehook; from oncehook import once; assert once is oncehook.once; once(key='x')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert oncehook.once is once


def test_a_script_and_who_imports_it_mean_the_same_key(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from oncehook import once\n"
        f"@once(key='order', store='sqlite:{tmp_path}/c.db')\n"
        "def charge(order):\n    return __name__\n"
        "if __name__ == '__main__':\n    charge('1')\n"
    )
    for arguments in (["shop.py"], ["-m", "shop"], ["-c", "import shop; assert shop.charge('1') == '__main__'"]):
        subprocess.run([sys.executable, *arguments], check=True, cwd=tmp_path)
    assert list(names(tmp_path)) == ["shop.charge:1"]
