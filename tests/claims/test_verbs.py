"""What each verb promises, on every backend (R70, R71, R72, R73)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from oncehook import clock
from oncehook.claims import AsyncClaims, Claims
from oncehook.claims.client import MAX_KEY, MAX_RESULT, stored_key
from oncehook.errors import (
    AlreadyDone,
    ClaimLost,
    ConfigError,
    InProgress,
    KeyMissing,
    PayloadMismatch,
    ResultInvalid,
)
from tests.claims.conftest import left_of, wait_for_renewals

SHORT = 0.3


def lapse(claims: Claims, key: str) -> None:
    """Wait until nobody has the key; the test's own time limit is the only one."""
    while claims.look(key) is not None:
        time.sleep(0.02)


def in_time(claims: Claims, key: str, verb: str, *more: object, **settings: object) -> str | None:
    """Claim a key for a second, and do this before it is over: again, where the machine stood still for that long."""
    while True:
        token = claims.claim(key, ttl=1).token
        try:
            getattr(claims, verb)(key, token, *more, **settings)
        except ClaimLost:
            lapse(claims, key)
        else:
            return token


# -- three answers -----------------------------------------------------------------------------


def test_three_answers(claims: Claims, key: str) -> None:
    first = claims.claim(key)
    assert (first.status, first.result, first.degraded) == ("new", None, False)
    assert first.token
    second = claims.claim(key)
    assert (second.status, second.token, second.result) == ("in_progress", None, None)
    assert second.retry_after is not None
    assert 20 < second.retry_after <= 30
    claims.commit(key, first.token, result=b"\x00refunded\xff")
    third = claims.claim(key)
    assert (third.status, third.token, third.result) == ("done", None, b"\x00refunded\xff")


async def test_three_answers_on_an_event_loop(async_claims: AsyncClaims, key: str) -> None:
    first = await async_claims.claim(key)
    assert first.status == "new"
    assert (await async_claims.claim(key)).status == "in_progress"
    await async_claims.renew(key, first.token)
    await async_claims.commit(key, first.token, b"")
    assert (await async_claims.claim(key)).result == b""
    assert await async_claims.forget(key)
    assert await async_claims.look(key) is None
    again = await async_claims.claim(key)
    await async_claims.abort(key, again.token)
    with pytest.raises(ClaimLost):
        await async_claims.renew(key, again.token)


def test_no_result_is_not_an_empty_one(claims: Claims, key: str) -> None:
    claims.commit(key, claims.claim(key).token)
    assert claims.claim(key).result is None
    claims.forget(key)
    claims.commit(key, claims.claim(key).token, b"")
    assert claims.claim(key).result == b""


def test_both_faces_see_the_same(claims: Claims, store: str, key: str) -> None:
    async def other() -> str:
        async with AsyncClaims(store) as theirs:
            return (await theirs.claim(key)).status

    claims.commit(key, claims.claim(key).token)
    assert asyncio.run(other()) == "done"


def test_abort_lets_the_next_one_in(claims: Claims, key: str) -> None:
    claims.abort(key, claims.claim(key).token)
    assert claims.look(key) is None
    assert claims.claim(key).status == "new"


def test_other_keys_and_namespaces_are_independent(open_claims: Callable[..., Claims], key: str) -> None:
    ours, theirs = open_claims(), open_claims(namespace="billing")
    assert {ours.claim(key).status, ours.claim(key + "x").status, theirs.claim(key).status} == {"new"}


def test_looking_touches_nothing(claims: Claims, key: str) -> None:
    assert claims.look(key) is None
    claim = claims.claim(key)
    seen = claims.look(key)
    assert seen is not None
    assert (seen.status, seen.token) == ("in_progress", None)
    claims.commit(key, claim.token, b"r")
    seen = claims.look(key)
    assert seen is not None
    assert (seen.status, seen.result) == ("done", b"r")


# -- two phases --------------------------------------------------------------------------------


def test_a_claim_lapses_in_seconds_and_is_new_again(claims: Claims, key: str) -> None:
    claims.claim(key, ttl=SHORT)
    lapse(claims, key)
    assert claims.claim(key).status == "new"


def test_a_commit_outlives_the_ttl_and_ends_with_keep(claims: Claims, key: str) -> None:
    in_time(claims, key, "commit", b"r", keep="1h")
    claims.commit(f"{key}-short", claims.claim(f"{key}-short", ttl="1h").token, b"r", keep=SHORT)
    lapse(claims, f"{key}-short")
    assert claims.claim(f"{key}-short").status == "new"
    time.sleep(1.1)
    assert claims.claim(key).status == "done"


def test_renewing_holds_it(claims: Claims, key: str) -> None:
    token = in_time(claims, key, "renew", ttl="1h")
    assert 3000 < left_of(claims, key) <= 3600
    time.sleep(1.1)
    assert claims.claim(key).status == "in_progress", "longer than it was claimed for"
    claims.renew(key, token, ttl="30m")
    assert left_of(claims, key) <= 1800, "from now on, and not added"
    claims.commit(key, token)


# -- tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["renew", "commit", "abort"])
@pytest.mark.parametrize("token", ["0" * 32, "", "x", None])
def test_a_stolen_or_invented_token_is_refused(claims: Claims, key: str, verb: str, token: str | None) -> None:
    owner = claims.claim(key)
    with pytest.raises(ClaimLost):
        getattr(claims, verb)(key, token)
    assert claims.claim(key).status == "in_progress"
    claims.commit(key, owner.token, b"r")
    with pytest.raises(ClaimLost):
        getattr(claims, verb)(key, token)
    assert claims.claim(key).result == b"r"


@pytest.mark.parametrize("verb", ["renew", "commit", "abort"])
def test_a_lapsed_owner_is_refused_even_when_nobody_came(claims: Claims, key: str, verb: str) -> None:
    late = claims.claim(key, ttl=SHORT)
    lapse(claims, key)
    with pytest.raises(ClaimLost):
        getattr(claims, verb)(key, late.token)
    assert claims.look(key) is None


@pytest.mark.parametrize("verb", ["renew", "commit", "abort"])
def test_a_lapsed_owner_touches_nothing_of_its_successor(claims: Claims, key: str, verb: str) -> None:
    late = claims.claim(key, ttl=SHORT)
    lapse(claims, key)
    successor = claims.claim(key)
    assert successor.status == "new"
    with pytest.raises(ClaimLost):
        getattr(claims, verb)(key, late.token)
    assert claims.claim(key).status == "in_progress"
    claims.commit(key, successor.token, b"the successor's")
    with pytest.raises(ClaimLost):
        getattr(claims, verb)(key, late.token)
    assert claims.claim(key).result == b"the successor's"


def test_a_commit_may_be_repeated_by_its_owner(claims: Claims, key: str) -> None:
    """Its first answer may have been lost on the way."""
    owner = claims.claim(key)
    claims.commit(key, owner.token, b"first", keep=100)
    claims.commit(key, owner.token, b"second")
    assert claims.claim(key).result == b"first"


@pytest.mark.parametrize("verb", ["renew", "abort"])
def test_what_is_done_stays_done(claims: Claims, key: str, verb: str) -> None:
    owner = claims.claim(key)
    claims.commit(key, owner.token, b"r")
    with pytest.raises(ClaimLost):
        getattr(claims, verb)(key, owner.token)
    assert claims.claim(key).result == b"r"


# -- payloads, keys, results -------------------------------------------------------------------


def test_another_payload_under_the_same_key_is_an_error(claims: Claims, key: str) -> None:
    owner = claims.claim(key, payload=b"10 EUR")
    assert claims.claim(key, payload="10 EUR").status == "in_progress", "text and its bytes are the same"
    assert claims.claim(key).status == "in_progress", "who does not ask is not told"
    with pytest.raises(PayloadMismatch):
        claims.claim(key, payload=b"20 EUR")
    claims.commit(key, owner.token)
    with pytest.raises(PayloadMismatch):
        claims.claim(key, payload=b"20 EUR")
    assert claims.claim(key, payload=b"10 EUR").status == "done"


def test_a_successor_brings_its_own_payload(claims: Claims, key: str) -> None:
    claims.claim(key, ttl=SHORT, payload=b"old")
    lapse(claims, key)
    assert claims.claim(key, payload=b"new").status == "new"
    with pytest.raises(PayloadMismatch):
        claims.claim(key, payload=b"old")


NASTY = [
    "a",
    " a",
    "a ",
    "A",
    "é",
    "e\u0301",
    "a\x00",
    "a\x00b",
    "a\nb",
    "\ud800",
    "%s",
    "{}",
    "*",
    "a:b",
    "sha256:" + "0" * 64,
    "k" * MAX_KEY,
    "k" * (MAX_KEY + 1),
    "k" * 100_000,
    "k" * 100_000 + "l",
]


def test_keys_are_any_text_and_none_is_another(claims: Claims) -> None:
    tokens = {text: claims.claim(text).token for text in [*NASTY, stored_key("k" * 100_000)]}
    assert None not in tokens.values()
    for text, token in tokens.items():
        claims.commit(text, token, stored_key(text).encode())
    assert {text: claims.claim(text).result for text in tokens} == {t: stored_key(t).encode() for t in tokens}
    for text in tokens:
        claims.forget(text)


@pytest.mark.parametrize("wrong", ["", None, 42, b"a"])
def test_a_key_must_be_there(claims: Claims, wrong: object) -> None:
    with pytest.raises(KeyMissing):
        claims.claim(wrong)  # type: ignore[arg-type]


def test_a_result_that_is_too_large_is_refused_and_the_claim_stands(claims: Claims, key: str) -> None:
    owner = claims.claim(key)
    with pytest.raises(ResultInvalid, match="too large"):
        claims.commit(key, owner.token, b"x" * (MAX_RESULT + 1))
    assert claims.claim(key).status == "in_progress"
    claims.commit(key, owner.token, b"x" * MAX_RESULT)
    assert len(claims.claim(key).result or b"") == MAX_RESULT


@pytest.mark.parametrize("settings", [{"ttl": 0}, {"keep": "0s"}, {"ttl": "soon"}, {"namespace": "a:b"}])
def test_settings_that_cannot_be_right(store: str, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Claims(store, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["mongodb://x", "sqlite:", "sqlite::memory:", "redis://127.0.0.1:port", ""])
def test_addresses_that_cannot_be_right(url: str) -> None:
    with pytest.raises(ConfigError):
        Claims(url)
    with pytest.raises(ConfigError):
        AsyncClaims(url)


# -- time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew", [-3600, 3600])
def test_a_clients_clock_changes_nothing(claims: Claims, key: str, skew: int, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = claims.claim(key)
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + skew)
    assert abs(clock.now() - wall() - skew) < 60, "the clock of this process is wrong now"
    seen = claims.claim(key)
    assert seen.status == "in_progress"
    assert seen.retry_after is not None
    assert 20 < seen.retry_after <= 30
    claims.renew(key, owner.token, ttl=SHORT)
    lapse(claims, key)
    claims.commit(key, claims.claim(key).token, keep="1h")
    monkeypatch.undo()
    assert claims.claim(key).status == "done"


# -- hold --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("often")
def test_holding_renews_then_commits(open_claims: Callable[..., Claims], key: str) -> None:
    claims = open_claims(ttl=20)
    with claims.hold(key) as held:
        wait_for_renewals(claims, key)
        assert not held.lost
        held.result = b"r"
    assert claims.claim(key).result == b"r"
    with pytest.raises(AlreadyDone) as done, claims.hold(key):
        pytest.fail("this must not run")
    assert done.value.result == b"r"


@pytest.mark.usefixtures("often")
async def test_holding_on_an_event_loop(claims: Claims, store: str, key: str) -> None:
    async with AsyncClaims(store, ttl=20) as async_claims:
        async with async_claims.hold(key) as held:
            with pytest.raises(InProgress):
                async with async_claims.hold(key):
                    pytest.fail("this must not run")
            await asyncio.to_thread(wait_for_renewals, claims, key)
            assert not held.lost
            held.result = b"r"
        assert (await async_claims.claim(key)).result == b"r"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_gives_it_back(claims: Claims, key: str, error: type[BaseException]) -> None:
    with pytest.raises(error), claims.hold(key):  # noqa: PT012
        with pytest.raises(InProgress) as busy, claims.hold(key):
            pytest.fail("this must not run")
        assert busy.value.retry_after
        raise error
    assert claims.claim(key).status == "new"


async def test_a_cancelled_task_gives_it_back(async_claims: AsyncClaims, key: str) -> None:
    inside = asyncio.Event()

    async def work() -> None:
        async with async_claims.hold(key):
            inside.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await async_claims.claim(key)).status == "new"


def test_a_holder_that_lost_it_is_told_and_commits_nothing(open_claims: Callable[..., Claims], key: str) -> None:
    claims, operator = open_claims(ttl=0.6), open_claims()
    with pytest.raises(ClaimLost), claims.hold(key) as held:  # noqa: PT012
        operator.forget(key)
        successor = operator.claim(key)
        while not held.lost:
            time.sleep(0.02)
        held.result = b"late"
    operator.commit(key, successor.token, b"the successor's")
    assert operator.claim(key).result == b"the successor's"


def test_a_held_result_that_is_too_large_still_counts_as_done(claims: Claims, key: str) -> None:
    with pytest.raises(ResultInvalid), claims.hold(key) as held:
        held.result = b"x" * (MAX_RESULT + 1)
    assert claims.claim(key).status == "done"


def test_no_thread_is_left(claims: Claims, key: str) -> None:
    def renewing() -> int:
        return sum(thread.name == "oncehook-claim" for thread in threading.enumerate())

    with claims.hold(key):
        assert renewing() == 1
    assert renewing() == 0
