"""One winner, however many ask: threads, processes, tasks, forks; and what a killed owner leaves behind."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from oncehook.claims import AsyncClaims, AsyncDedupLock, Claims, DedupLock
from oncehook.errors import ConfigError, KeyMissing
from tests.claims.conftest import BEATS, left_of, wait_for_renewals
from tests.claims.racer import THREADS as racer_threads

ROOT = Path(__file__).parents[2]
THREADS = 32
PROCESSES = 8
ROUNDS = 20


def at_once(work: Callable[[int], str], count: int = THREADS) -> Counter[str]:
    """The answers of many threads that begin at the same moment."""
    barrier = threading.Barrier(count)

    def run(number: int) -> str:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return Counter(pool.map(run, range(count)))


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.claims.racer", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def test_of_many_threads_one_is_new(claims: Claims, key: str) -> None:
    for number in range(5):
        assert at_once(lambda _, at=number: claims.claim(f"{key}-{at}").status) == {
            "new": 1,
            "in_progress": THREADS - 1,
        }


def test_of_many_threads_with_lines_of_their_own_one_is_new(open_claims: Callable[..., Claims], key: str) -> None:
    """Also when none of them has asked before, and the table is not there yet."""
    several = [open_claims() for _ in range(8)]
    answers = at_once(lambda number: several[number].claim(key).status, 8)
    assert answers == {"new": 1, "in_progress": 7}


def test_of_many_processes_one_is_new(store: str, key: str) -> None:
    racers = [start(store, key, str(ROUNDS)) for _ in range(PROCESSES)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    said = Counter(line for racer in racers for line in racer.communicate()[0].splitlines())
    assert [racer.returncode for racer in racers] == [0] * PROCESSES
    assert said.total() == ROUNDS * PROCESSES * racer_threads
    assert {number: said[f"{number} new"] for number in range(ROUNDS)} == dict.fromkeys(range(ROUNDS), 1)
    assert {line.split()[1] for line in said} <= {"new", "in_progress", "done"}
    assert not [number for number in range(0, ROUNDS, 2) if said[f"{number} done"]], "nobody committed that one"


async def test_of_many_tasks_one_is_new(async_claims: AsyncClaims, key: str) -> None:
    answers = await asyncio.gather(*(async_claims.claim(key) for _ in range(100)))
    assert Counter(answer.status for answer in answers) == {"new": 1, "in_progress": 99}


def test_one_object_serves_several_event_loops(store: str, key: str) -> None:
    """One after the other, and at the same time."""
    claims = AsyncClaims(store)

    async def ask() -> str:
        return (await claims.claim(key)).status

    async def ask_beside_another() -> list[str]:
        first = await ask()
        beside = await asyncio.to_thread(asyncio.run, ask())
        return [first, beside, await ask()]

    assert asyncio.run(ask()) == "new"
    assert asyncio.run(ask_beside_another()) == ["in_progress"] * 3
    asyncio.run(claims.close())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_goes_on_by_itself(claims: Claims, key: str) -> None:
    """As under gunicorn --preload: connections of the parent are neither used nor closed by its children."""
    claims.claim(key)
    at_once(lambda _: str(claims.look(key)), 8)  # as many connections as it may have
    line: Any = claims._connector
    mine = [*getattr(line, "_idle", ()), getattr(line, "_connection", None)]
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def child() -> None:
        said = claims.claim(key).status, claims.claim(f"{key}-child").status
        now = [*getattr(line, "_idle", ()), getattr(line, "_connection", None)]
        inherited = {id(one) for one in mine if one is not None} & {id(one) for one in now}
        answers.put(said if not inherited else ("inherited", "inherited"))

    busy = threading.Event()

    def keep_busy() -> None:
        while not busy.is_set():
            claims.look(key)

    other = threading.Thread(target=keep_busy)
    other.start()
    children = [context.Process(target=child) for _ in range(3)]
    for one in children:
        one.start()
    got = [answers.get() for _ in children]
    for one in children:
        one.join()
    busy.set()
    other.join()
    assert [mine for mine, _ in got] == ["in_progress"] * 3
    assert Counter(theirs for _, theirs in got) == {"new": 1, "in_progress": 2}
    assert claims.claim(key).status == "in_progress"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_goes_on_by_itself_on_an_event_loop(store: str, key: str) -> None:
    claims = AsyncClaims(store)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    async def ask() -> str:
        return (await claims.claim(key)).status

    assert asyncio.run(ask()) == "new"
    child = context.Process(target=lambda: answers.put(asyncio.run(ask())))
    child.start()
    assert answers.get() == "in_progress"
    child.join()
    assert asyncio.run(ask()) == "in_progress"
    asyncio.run(claims.close())


async def test_a_cancelled_ask_mixes_up_no_answers(async_claims: AsyncClaims, key: str) -> None:
    for name in ("a", "b"):
        claim = await async_claims.claim(f"{key}-{name}")
        await async_claims.commit(f"{key}-{name}", claim.token, name.encode())
    for number in range(40):
        task = asyncio.create_task(async_claims.look(f"{key}-a"))
        await asyncio.sleep(number / 20_000)
        task.cancel()
        await asyncio.wait([task])
        seen = await async_claims.look(f"{key}-b")
        assert seen is not None
        assert seen.result == b"b"


# -- kill -9 -----------------------------------------------------------------------------------


def test_a_killed_owner_blocks_for_its_ttl_and_not_a_day(claims: Claims, store: str, key: str) -> None:
    owner = start("--hold", store, key, "5s", str(BEATS))
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    wait_for_renewals(claims, key)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert claims.claim(key).status == "in_progress", "it may still be alive"
    left = left_of(claims, key)
    assert left <= 5
    time.sleep(left + 0.05)
    successor = claims.claim(key)
    assert successor.status == "new"
    claims.commit(key, successor.token)


# -- the first story's lock --------------------------------------------------------------------


def test_the_lock_of_the_first_story(store: str, key: str) -> None:
    lock = DedupLock(key, store=store)
    assert lock.acquire() is True
    assert lock.acquire() is False
    assert DedupLock(key, store=store).acquire() is False
    assert DedupLock(f"{key}-other", store=store).acquire() is True


def test_of_two_racing_threads_exactly_one_gets_the_lock(store: str, key: str) -> None:
    for number in range(10):
        answers = at_once(lambda _, at=number: str(DedupLock(f"{key}-{at}", store=store).acquire()), 2)
        assert answers == {"True": 1, "False": 1}


def test_only_the_owner_releases_the_lock(store: str, key: str) -> None:
    owner, other = DedupLock(key, store=store), DedupLock(key, store=store)
    assert owner.acquire()
    assert not other.acquire()
    assert other.release() is False
    assert not other.acquire()
    assert owner.release() is True
    assert owner.release() is False
    assert other.acquire()


def test_the_lock_is_held_for_a_day_and_apart_from_claims(claims: Claims, store: str, key: str) -> None:
    assert DedupLock(key, store=store).acquire()
    assert claims.claim(key).status == "new"
    seen = DedupLock(key, store=store)._claims.look(key)
    assert seen is not None
    assert seen.retry_after is not None
    assert 86_000 < seen.retry_after <= 86_400


async def test_the_lock_on_an_event_loop(store: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCEHOOK_CLAIMS", store)
    locks = [AsyncDedupLock(key) for _ in range(10)]
    taken = await asyncio.gather(*(lock.acquire() for lock in locks))
    assert taken.count(True) == 1
    released = [await lock.release() for lock in locks]
    assert released == taken


def test_the_same_id_is_locked_once_per_prefix(store: str, key: str) -> None:
    assert DedupLock(key, store=store, prefix="inbox-1:").acquire()
    assert DedupLock(key, store=store, prefix="inbox-2:").acquire()
    assert DedupLock(key, store=store).acquire()
    assert not DedupLock(key, store=store, prefix="inbox-1:").acquire()
    with pytest.raises(KeyMissing):
        DedupLock("", store=store, prefix="inbox-1:").acquire()


def test_what_ones_own_database_has_is_not_handled_again(store: str, key: str) -> None:
    # Chatwoot's order: a message that is in the database is left alone, whatever the lock has forgotten.
    asked: list[str] = []
    messages = {f"{key}-old"}

    def seen(source_id: str) -> bool:
        asked.append(source_id)
        return source_id in messages

    old = DedupLock(f"{key}-old", store=store, prefix="p:", seen=seen)
    assert not old.acquire()
    assert not old.release()
    fresh = DedupLock(f"{key}-new", store=store, prefix="p:", seen=seen)
    assert fresh.acquire()
    assert asked == [f"{key}-old", f"{key}-new"]
    assert not DedupLock(f"{key}-new", store=store, prefix="p:", seen=seen).acquire()
    assert len(asked) == 2  # who does not get the lock has nothing to look up
    assert fresh.release()


def test_a_look_that_fails_does_not_lock_the_message_away(store: str, key: str) -> None:
    def seen(source_id: str) -> bool:
        raise LookupError("the database is away")

    with pytest.raises(LookupError):
        DedupLock(key, store=store, seen=seen).acquire()
    assert DedupLock(key, store=store).acquire()


async def test_the_look_on_an_event_loop(store: str, key: str) -> None:
    async def seen(source_id: str) -> object:
        return {"id": 1} if source_id.endswith("old") else None

    assert not await AsyncDedupLock(f"{key}-old", store=store, seen=seen).acquire()
    assert await AsyncDedupLock(f"{key}-new", store=store, seen=seen, prefix="a:").acquire()
    assert not await AsyncDedupLock(f"{key}-b", store=store, seen=lambda source_id: True).acquire()

    async def fails(source_id: str) -> bool:
        raise LookupError

    with pytest.raises(LookupError):
        await AsyncDedupLock(f"{key}-c", store=store, seen=fails).acquire()
    assert await AsyncDedupLock(f"{key}-c", store=store).acquire()
    with pytest.raises(ConfigError, match="plain function"):
        DedupLock(key, store=store, seen=seen)  # a coroutine would always look like "seen"
