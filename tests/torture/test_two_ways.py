"""Arrivals that the server answers itself cannot be told from mounted ones: same bytes, same answers, same traces.

Seeded by TORTURE_SEED; TORTURE_CASES says how many damaged requests are tried.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from oncehook import faults
from oncehook.sources import Reply
from tests.effort import effort, first_seed
from tests.torture.fuzz_pair import (
    HANDED,
    LAST,
    WAYS,
    Heard,
    Served,
    ask,
    both_ways,
    break_off,
    dial,
    hear,
    quick,
    say,
    served,
    talks_at_once,
    without_ids,
)
from tests.torture.fuzz_wire import CORPUS, damaged, padded, pieces, post
from tests.waiting import until
from tests.wire import Client

SEED = first_seed(1)
CASES = effort("CASES", 400)
TOGETHER = 60
"""Talks at once."""

Pair = tuple[Served, Served]
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop
}  # fmt: skip


def on(loop: str, main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main)


every_loop = pytest.mark.parametrize("loop", LOOPS)
both = pytest.mark.parametrize("way", [*WAYS, HANDED])
others = pytest.mark.parametrize("other", [way for way in (*WAYS, HANDED) if way != "direct"])


Talk = tuple[str, Callable[[str], list[bytes]]]
"""Its name, and the pieces it says when its keys bear a mark."""

AGAIN = 8
"""How often what differed is said again, alone, before it is called a difference."""
SLOW = 0.01
"""Seconds of a slow commit: many turns of the loop, and fewer than `talks_at_once` waits for answers."""


async def compare(pair: Pair, talks: Sequence[Talk]) -> None:
    """Say all of it to both; fails with what was answered differently, or kept differently."""
    differ: list[tuple[Talk, list[bytes]]] = []
    for start in range(0, len(talks), TOGETHER):
        group = talks[start : start + TOGETHER]
        answers = await talks_at_once(pair, [make("a") for _, make in group])
        differ += [(one, two) for one, two in zip(group, answers, strict=True) if two[0] != two[1]]
    # Whether an answer is given before what stands behind it is read, is up to the disk. Both ways can do either.
    wrong = [
        f"{name}\n  direct {two[0]!r}\n  other  {two[1]!r}"
        for (name, make), two in differ
        if not await meet(pair, make, two)
    ]
    assert not wrong, "\n".join(wrong)
    assert len(differ) <= len(talks) // 20, "too much is left to chance"
    marked = [repr(mark)[2:-1] for (name, _), _ in differ for mark in (name.partition(":")[0].encode(),)]
    kept = [[row for row in one.kept() if not any(mark in repr(row) for mark in marked)] for one in pair]
    assert kept[0] == kept[1]


async def meet(pair: Pair, make: Callable[[str], list[bytes]], two: Sequence[bytes]) -> bool:
    """Return whether both ways come to the same answers when they are given more chances.

    Every second time the disk is slow: where a commit takes no time, as in memory, the direct way answers before it
    reads on, and the other hardly ever does.
    """
    seen = [{answer} for answer in two]
    for number, mark in enumerate("bcdefghijklm"[:AGAIN]):
        with slow_commits(SLOW * (number % 2)):
            said = await talks_at_once(pair, [make(mark)])
        for answers, answer in zip(seen, said[0], strict=True):
            answers.add(answer)
        if not seen[0].isdisjoint(seen[1]):
            return True
    return False


@contextmanager
def slow_commits(seconds: float) -> Iterator[None]:
    """Hold every commit of arrivals for so long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "point", lambda name: time.sleep(seconds) if name == "before_intake" else None)
        yield


def whole(name: str) -> Talk:
    return name, lambda mark: [CORPUS[name](f"{name[:40]}-{mark}")]


def byte_by_byte(name: str) -> Talk:
    def said(mark: str) -> list[bytes]:
        data = CORPUS[name](f"{name[:40]}-{mark}")
        return [data[n : n + 1] for n in range(len(data))]

    return name, said


def cut(at: int) -> Talk:
    def said(mark: str) -> list[bytes]:
        data = post(f"cut {at:03}-{mark}")
        return [data[:at], data[at:]]

    return f"cut {at:03}", said


def by_chance(number: int) -> Talk:
    name = f"chance {SEED}-{number}-"

    def said(mark: str) -> list[bytes]:
        chance = random.Random(name)
        return pieces(chance, damaged(chance, chance.choice(list(CORPUS.values()))(name + mark)))

    return name, said


TALKS: dict[str, list[Talk]] = {
    "whole": [whole(name) for name in CORPUS],
    "byte by byte": [
        byte_by_byte(name) for name in CORPUS if len(CORPUS[name]("x")) < 1500 and "query byte" not in name
    ],
    "cut once": [cut(at) for at in range(1, len(post("cut 000-a")))],
    "by chance": [by_chance(number) for number in range(CASES)],
}


@every_loop
@others
@pytest.mark.parametrize("talks", TALKS)
def test_both_ways_answer_and_keep_the_same(tmp_path: Path, loop: str, talks: str, other: str) -> None:
    async def main() -> None:
        async with both_ways(tmp_path, other) as pair:
            await compare(pair, TALKS[talks])
            assert Heard.taken > len(TALKS[talks]) // 20, "hardly anything was answered directly: this proves nothing"

    on(loop, main())


@both
async def test_a_source_answers_in_its_own_way(tmp_path: Path, way: str) -> None:
    """What the corpus asks of `odd` and `told` is as unusual as it is meant to be."""
    async with served(tmp_path, way) as one:
        odd, hello, told = [
            await ask(one, [CORPUS[name]("own")]) for name in ("odd statuses", "handshake", "answer of its own")
        ]
        assert odd.startswith(b"HTTP/1.1 299 ")
        assert b"\r\n\r\nhello" in hello
        assert told.startswith(b"HTTP/1.1 202 ")
        assert b"<Response/>" in told


# -- one connection, many requests; senders that leave -----------------------------------------


async def converse(one: Served, seed: int) -> list[tuple[int, bytes, str]]:
    """A well-behaved sender that repeats itself, lies, and sends other things in between."""
    chance, client, heard = random.Random(seed), Client("127.0.0.1", one.port), []
    for _ in range(150):
        data = CORPUS[chance.choice(POLITE)](f"talk-{chance.randrange(40)}")
        answer = await client.send_raw(data)
        heard.append((answer.status, without_ids(answer.body), answer.headers.get("connection", "")))
    client.close()
    return heard


POLITE = [
    *(
        "valid",
        "empty body",
        "not JSON",
        "wrong signature",
        "no signature",
        "key required",
        "ignored",
        "fenced",
        "open",
    ),
    *("handshake", "answer of its own", "batch", "encoded", "HTTP/1.0", "target /in/orders/", "target /in/nobody"),
    *("method GET", "header b'Connection: close'", "chunked", "body of 65535", "body of 65536", "body of 65537"),
    *("small body of 2000", "small body of 2001", "header b'X-Value: \\xe4\\xff'", "upper case"),
]


@every_loop
@others
def test_long_conversations_are_the_same(tmp_path: Path, loop: str, other: str) -> None:
    async def main() -> None:
        async with both_ways(tmp_path, other) as pair:
            for seed in range(4):
                direct, answers = await asyncio.gather(*(converse(one, SEED * 100 + seed) for one in pair))
                assert direct == answers
            assert pair[0].kept() == pair[1].kept()

    on(loop, main())


@every_loop
@others
def test_senders_that_leave_in_the_middle_leave_the_same(tmp_path: Path, loop: str, other: str) -> None:
    async def main() -> None:
        async with both_ways(tmp_path, other) as pair:
            data = post("leaving-000")
            for n in range(1, len(data), 3):
                for one in pair:
                    await break_off(one, [post(f"leaving-{n:03}")[:n]])
            for one in pair:
                await until(lambda one=one: not one.connections)  # type: ignore[misc]
                assert one.hooks.budget.held == 0
            assert pair[0].kept() == pair[1].kept() == []
            for one in pair:  # whole, and gone before the answer: kept all the same
                await break_off(one, [post("left")])
                await until(lambda one=one: len(one.kept()) == 1)  # type: ignore[misc]
            assert pair[0].kept() == pair[1].kept()

    on(loop, main())


# -- patience and room, on both ways -----------------------------------------------------------


@every_loop
@both
def test_no_answer_waits_for_the_sender_to_confirm_its_first_half(tmp_path: Path, loop: str, way: str) -> None:
    """An answer of two writes would take 40 ms longer where the system gathers small ones (Nagle)."""

    async def main() -> None:
        async with served(tmp_path, way) as one:
            with closing(await dial(one.port)):
                await until(lambda: one.connections)
                line = one.connections[0].transport.get_extra_info("socket")
                assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    on(loop, main())


@both
async def test_a_sender_that_pipelines_and_never_reads_costs_little(tmp_path: Path, way: str) -> None:
    refused, taken = post("x", secret="another"), post("taken")
    async with served(tmp_path, way) as one:
        for data in (refused * 4000, taken * 4000):
            line = await dial(one.port, receive_buffer=4096)
            sending = asyncio.create_task(say(line, [data]))
            for _ in range(100):
                await asyncio.sleep(0.01)
                for connection in one.connections:
                    assert len(connection.pipeline) <= one.guard.limits.pipelined
                    assert connection.transport.get_write_buffer_size() < 128 << 10
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            line.close()
            await until(lambda: not one.connections)


@every_loop
@both
def test_answers_stay_in_order_however_slowly_they_are_taken(tmp_path: Path, loop: str, way: str) -> None:
    """What another process answers comes behind everything that was answered before, also what nobody has taken yet."""
    forged = post("x", secret="another")

    async def main() -> None:
        async with served(tmp_path, way) as one:
            line = await dial(one.port, receive_buffer=4096)
            with closing(line):
                await until(lambda: one.connections)
                taken = one.connections[0].transport.get_extra_info("socket")
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                for _ in range(4):  # few at once, or too many would wait
                    await say(line, [forged * 50])
                    await until(lambda: not any(connection.pipeline for connection in one.connections))
                assert any(connection.transport.get_write_buffer_size() for connection in one.connections)
                await say(line, [LAST])
                await asyncio.sleep(0.1)
                heard = await hear(line)
            statuses = [part[:3] for part in heard.split(b"HTTP/1.1 ")[1:]]
            assert statuses == [b"401"] * 200 + [b"200"]

    on(loop, main())


@both
async def test_more_at_once_than_may_wait_are_answered_as_far_as_they_may(tmp_path: Path, way: str) -> None:
    async with served(tmp_path, way) as one:
        answers = await ask(one, [b"".join(post(f"at-once-{n:03}") for n in range(200))])
        count = answers.count(b"HTTP/1.1 200 OK")
        assert one.guard.limits.pipelined <= count < 200
        assert answers.count(b"connection: close") == 1, "the sender is told that there is no more to come"
        assert len(one.kept()) == count


@both
async def test_who_takes_no_answers_is_cut_off(tmp_path: Path, way: str) -> None:
    async with served(tmp_path, way, quick(body_seconds=1)) as one:
        line = await dial(one.port, receive_buffer=2048)
        with closing(line):
            await until(lambda: one.connections)
            (connection,) = one.connections
            # As if the system's buffers were full; making them so takes megabytes of answers.
            connection.pause_writing()
            await say(line, [post("stuck")])
            await until(lambda: not one.connections)
    assert one.guard.refused == {}


@both
@pytest.mark.parametrize("said", ["half a head", "half a body", "an answered one and half a head"])
async def test_who_is_slow_is_told_so(tmp_path: Path, way: str, said: str) -> None:
    data = post("slow")
    pieces = {
        "half a head": [data[:40]],
        "half a body": [data[:-9]],
        # All in one piece: the second one's time begins although nothing more is read.
        "an answered one and half a head": [post("quick", secret="another") + data[:40]],
    }[said]
    late = quick(body_seconds=0.5) if said == "half a body" else quick(head_seconds=0.5)
    async with served(tmp_path, way) as one:
        asked = asyncio.create_task(ask(one, pieces, last=b""))
        await until(lambda: any(one.said.values()) or any(connection._overhead for connection in one.connections))
        one.guard.limits = late  # only now: what was said must have been read in time
        answers = await asked
        assert answers.endswith(b'"code":"too_slow"}')
        assert answers.count(b"HTTP/1.1 ") == (2 if said.startswith("an answered") else 1)
        assert one.kept() == []


@both
async def test_a_connection_that_rests_too_long_is_closed(tmp_path: Path, way: str) -> None:
    async with served(tmp_path, way, quick(head_seconds=30)) as one:
        one.guard.limits = replace(one.guard.limits, idle_seconds=1)
        answers = await ask(one, [post("rest")], last=b"")
        assert answers.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" not in answers


@both
async def test_stopping_answers_what_is_under_way(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reached = threading.Event(), threading.Event()

    def point(name: str) -> None:
        if name == "before_intake":
            reached.set()
            gate.wait(60)

    async with served(tmp_path, way, quick(body_seconds=1)) as one:
        monkeypatch.setattr(faults, "point", point)
        said = asyncio.create_task(ask(one, [post("under-way")], last=b""))
        resting = asyncio.create_task(ask(one, [], last=b""))
        assert await asyncio.to_thread(reached.wait, 60)
        reading = asyncio.create_task(ask(one, [post("unfinished")[:-1]], last=b""))
        await until(lambda: (len(one.connections) == 3 and one.hooks.budget.held) or reading.done())
        one.stop.set()
        assert await resting == b""
        assert not said.done()
        gate.set()
        answers = await said
        assert answers.startswith(b"HTTP/1.1 200 OK")
        assert b"connection: close" in answers
        assert b'"too_slow"' in await reading


@both
async def test_unfinished_bodies_are_bounded_together(tmp_path: Path, way: str) -> None:
    async with served(tmp_path, way, most_held=150_000) as one:
        large = post("large", body=padded("large", 60_000))
        lines = [await dial(one.port) for _ in range(3)]
        for line in lines:
            await say(line, [large[:40_000], large[40_000:59_000]])
        await until(lambda: any(one.said.values()))
        answers = [b"".join(said) for said in one.said.values() if said]
        assert len(answers) == 1
        assert b"HTTP/1.1 503 " in answers[0]
        assert b'"overloaded"' in answers[0]
        assert b"200 OK" in await ask(one, [post("small ones pass")])
        for line in lines:
            line.close()
        await until(lambda: not one.connections)
        assert one.hooks.budget.held == 0


@every_loop
@both
def test_a_body_that_waits_makes_way_for_one_that_comes(tmp_path: Path, loop: str, way: str) -> None:
    """The largest is refused, also while nothing more of it comes; its connection stays in step."""

    async def main() -> None:
        async with served(tmp_path, way, most_held=100_000) as one:
            large, small = post("large", body=padded("large", 60_000)), post("small", body=padded("small", 50_000))
            waiting, coming = await dial(one.port), await dial(one.port)
            with closing(waiting), closing(coming):
                await say(waiting, [large[:30_000], large[30_000:59_900]])
                await until(lambda: one.hooks.budget.held > 58_000)
                await say(coming, [small[:45_000]])
                await until(lambda: any(one.said.values()))
                assert 40_000 < one.hooks.budget.held < 50_000
                await say(waiting, [large[59_900:], post("next"), LAST])
                heard = await hear(waiting)
                assert [part[:3] for part in heard.split(b"HTTP/1.1 ")[1:]] == [b"503", b"200", b"200"]
                await say(coming, [small[45_000:], LAST])
                assert b'"accepted"' in await hear(coming)
            assert sorted(row[1] for row in one.kept()) == ["next", "small"]
            assert one.hooks.budget.held == 0

    on(loop, main())


@both
async def test_nothing_is_held_for_nobody_but_too_much_is_refused_alike(tmp_path: Path, way: str) -> None:
    answers = []
    for source in ("orders", "nobody"):
        (folder := tmp_path / source).mkdir()
        async with served(folder, way, most_held=100_000) as one:
            large = post("large", f"/in/{source}", body=padded("large", 60_000), secret="another")
            lines = [await dial(one.port) for _ in range(2)]
            for line in lines:
                await say(line, [large[:30_000], large[30_000:59_000]])
            await until(lambda one=one: any(one.said.values()))  # type: ignore[misc]
            assert (one.hooks.budget.held == 0) is (source == "nobody")
            for line in lines:
                await say(line, [large[59_000:], LAST])
            answers.append(sorted([await hear(line) for line in lines]))
            for line in lines:
                line.close()
    assert answers[0] == answers[1]
    assert [b"401" in answer for answer in answers[0]] == [True, False]


async def test_the_way_through_the_server_does_not_depend_on_the_source(tmp_path: Path) -> None:
    """A faster way that is taken for some names only would tell which of them exist (S8)."""
    async with served(tmp_path, "direct") as one:
        taken = {}
        for source in ("nobody", "orders", "small", "hidden", "k7_Qm2ZxN4vT9sLdR1wYhE", "revived", "fenced"):
            for size in (100, 2001, 60_000, 70_000):
                Heard.taken = 0
                await ask(one, [post("x", f"/in/{source}", body=padded("x", size), secret="another")])
                taken.setdefault(size, set()).add(Heard.taken)
        assert taken == {size: {1} for size in (100, 2001, 60_000, 70_000)}


@both
async def test_what_was_put_off_leaves_the_connection_in_step(tmp_path: Path, way: str) -> None:
    async with served(tmp_path, way, most_held=10_000) as one:
        large = post("large", body=padded("large", 60_000))
        answers = await ask(one, [large[:30_000], large[30_000:40_000], large[40_000:], post("next")])
        assert [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]] == [b"503", b"200", b"200"]
        assert [row[1] for row in one.kept()] == ["next"]


@every_loop
def test_who_asks_to_close_and_takes_no_answer_is_cut_off(tmp_path: Path, loop: str) -> None:
    """A connection that is being closed waits until its last answer is taken: that must have an end, too."""

    async def main() -> None:
        async with served(tmp_path, "direct", quick(body_seconds=1)) as one:
            told = one.inbox.sources["told"]
            told.base = told.base.replace(answer=Reply(200, b"x" * (8 << 20)))
            line = await dial(one.port, receive_buffer=2048)
            with closing(line):
                await say(line, [post("last", "/in/told", Connection="close")])
                await until(lambda: any(one.said.values()))
                await until(lambda: not one.connections)

    on(loop, main())
