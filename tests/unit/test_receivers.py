"""The channel between a server and its receivers: messages in order, sockets beside them, and an end that is seen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

import pytest
from tests.waiting import until

from oncehook.web.receivers import MOST_HANDED_OVER, Channel, Handed, Message, Ready, Watched, hand_over


class Ends:
    """Both ends of a channel in one process, and what came out of the second."""

    def __init__(self) -> None:
        self.received: list[tuple[Message, int | None]] = []
        self.is_over = False
        ours, self.raw = socket.socketpair()
        theirs = self.raw.dup()
        self.first = Channel(ours, lambda message, descriptor: None, lambda: None)
        self.second = Channel(theirs, lambda *one: self.received.append(one), self._end)

    def _end(self) -> None:
        self.is_over = True

    def close(self) -> None:
        for _, descriptor in self.received:
            if descriptor is not None:
                os.close(descriptor)
        self.first.close()
        self.second.close()
        self.raw.close()


@pytest.fixture
async def ends() -> Iterator[Ends]:  # type: ignore[misc]
    made = Ends()
    yield made
    made.close()


@contextlib.contextmanager
def line() -> Iterator[tuple[socket.socket, int]]:
    """A socket to hand over, and its number."""
    one, other = socket.socketpair()
    with one, other:
        yield other, os.dup(one.fileno())


async def test_messages_come_whole_and_in_order(ends: Ends) -> None:
    with line() as (_, descriptor):
        ends.first.send(Ready())
        assert hand_over(ends.first, descriptor, b"x" * 3_000_000)  # more than the system takes at once
        ends.first.send(Watched(True))
        assert ends.first.waiting
        await until(lambda: len(ends.received) == 3)
    assert isinstance(ends.received[0][0], Ready)
    handed, came = ends.received[1]
    assert isinstance(handed, Handed)
    assert len(handed.data) == 3_000_000
    assert came is not None
    assert os.fstat(came).st_ino == handed.inode
    assert not os.get_inheritable(came)
    assert ends.received[2][0] == Watched(True)


async def test_a_socket_that_got_lost_is_not_replaced_by_the_next(ends: Ends) -> None:
    """Where a process has no descriptor left, the system drops the socket and delivers the message without it."""
    with line() as (_, lost), line() as (_, second), line() as (_, third):
        ends.first.send(Handed(os.fstat(lost).st_ino, b"lost"))
        for descriptor, name in ((second, b"second"), (third, b"third")):
            hand_over(ends.first, descriptor, name)
        os.close(lost)
        await until(lambda: len(ends.received) == 3)
    sockets = [descriptor for _, descriptor in ends.received]
    assert sockets[0] is None
    for message, descriptor in ends.received[1:]:
        assert isinstance(message, Handed)
        assert descriptor is not None
        assert os.fstat(descriptor).st_ino == message.inode


async def test_too_many_on_their_way_are_refused(ends: Ends) -> None:
    with line() as (_, descriptor):
        while hand_over(ends.first, os.dup(descriptor), b"x" * 10_000):  # nothing is read meanwhile
            pass
        assert ends.first.waiting == MOST_HANDED_OVER
        os.close(descriptor)


async def test_the_end_of_the_other_process_is_seen(ends: Ends) -> None:
    with line() as (peer, descriptor):
        ends.raw.close()
        ends.first.close()
        await until(lambda: ends.is_over)
        assert not ends.second.is_open
        assert not hand_over(ends.second, os.dup(descriptor), b"x")
        os.close(descriptor)
        ends.second.send(Handed(1, b"x"), os.dup(peer.fileno()))  # closed, and nothing else happens
    await asyncio.sleep(0)
