"""A loop on which time is a number and the order of what is ready is drawn from a seed (PROMISES.md, T3).

`VirtualLoop` never waits: when nothing is ready it jumps to the next timer, and when there is none it says so instead
of hanging. What the store and the heartbeat do on threads is done on the loop, after a delay that is drawn too; so a
whole run is a function of its seed. `on_virtual_time` runs a coroutine on such a loop and holds `oncehook.clock` to it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from oncehook import clock, model
from oncehook.store.base import Reserved
from oncehook.store.sqlite import SqliteStore
from oncehook.store.sqlite.owner import OwnerServer
from oncehook.store.sqlite.writer import Writer
from oncehook.worker import Heartbeat

T = TypeVar("T")
EPOCH = 1_800_000_000.0


class Stalled(RuntimeError):
    """Nothing is ready, and nothing ever will be: somebody waits for a wake-up that is lost."""


class _Jump:
    """Stands for the selector: instead of waiting, time jumps."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Stalled
        if timeout > 0:
            self._loop.moment += timeout
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """See above."""

    def __init__(self, seed: object) -> None:
        super().__init__()
        self.moment = 0.0
        self.dice = random.Random(seed)
        self._selector = _Jump(self)

    def time(self) -> float:
        return self.moment

    def delay(self) -> float:
        """How long a disk takes: mostly no time at all, sometimes long."""
        return self.dice.choice((0.0, 0.0, 0.0002, 0.001, 0.005, 0.05))

    def _run_once(self) -> None:
        self.moment += 1e-6  # whatever a machine does takes time
        self.dice.shuffle(self._ready)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]

    def _process_events(self, events: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody sleeps who would have to be woken."""

    def run_in_executor(self, executor: Executor | None, function: Callable[..., T], *arguments: Any) -> Any:
        """On the loop, after a while."""
        done: asyncio.Future[T] = self.create_future()

        def run() -> None:
            if done.cancelled():
                return
            try:
                done.set_result(function(*arguments))
            except Exception as error:
                done.set_exception(error)

        self.call_later(self.delay(), run)
        return done


class _Commits:
    """The writer's line of commits: each is made on the loop, by the thread's own code."""

    def __init__(self, writer: Writer, loop: VirtualLoop) -> None:
        self._writer = writer
        self._loop = loop
        self._line: list[Any] = []

    def put(self, work: Any) -> None:
        if work is not None:
            self._loop.call_later(self._loop.delay(), self._commit, work)

    def _commit(self, work: Any) -> None:
        self._line = [work, None]
        self._writer._commit_until_closed()

    def get(self) -> Any:
        return self._line.pop(0)

    def join(self) -> None:
        """As its thread has one."""


class _LoopWriter(Writer):
    def start(self) -> None:
        self._loop = loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.broken = None
        self._commits = self._thread = _Commits(self, loop)  # type: ignore[assignment]


class VirtualStore(SqliteStore):
    """The SQLite store, with no thread of its own."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._writer = _LoopWriter(
            self.path,
            self.cipher,
            self._reports,
            lambda intakes: Reserved(self.observer.taker, self._source_names, intakes),
            self._begin_leased,
            max_waiting=5000,
            max_waiting_bytes=64 << 20,
        )

    def _listen(self) -> OwnerServer:
        raise OSError("this loop has no sockets")


class VirtualHeartbeat(Heartbeat):
    """Beats on the loop, now and then late, as a thread does on a busy machine."""

    _timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._plan()

    def _plan(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._timer = loop.call_later(self._interval * loop.dice.uniform(1.0, 1.3), self._beat_and_go_on)

    def _beat_and_go_on(self) -> None:
        self.beat()
        self._plan()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


@contextmanager
def _held_to(loop: VirtualLoop) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "now", lambda: EPOCH + loop.moment)
        patch.setattr(clock, "steady", lambda: loop.moment)
        patch.setattr(clock, "perf", lambda: loop.moment)
        patch.setattr(clock, "chance", loop.dice)
        patch.setattr(clock, "random_bits", loop.dice.getrandbits)
        patch.setattr(clock, "random_bytes", loop.dice.randbytes)
        model.start_ids_anew()
        try:
            yield
        finally:
            model.start_ids_anew()


def on_virtual_time(seed: object, main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """What the coroutine returns, on a loop of this seed."""
    loop = VirtualLoop(seed)
    with _held_to(loop), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main(loop))
