"""The numbers people ask for: per day and destination, replays, categories, and the daily volume of WhatsApp."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from oncehook import clock, presets
from oncehook.inbox import Inbox
from oncehook.model import EventId, Filter
from oncehook.settings import load
from oncehook.testing import send
from oncehook.upkeep import Limits, Watermark
from oncehook.web.api.schemas import encode
from oncehook.whatsapp.messages import Text
from tests.whatsapp.phone import Phone, busy, closed

MANY = 51


@pytest.fixture(autouse=True)
def noon() -> Iterator[None]:
    """No day ends while something is counted by days."""
    before = clock._skew
    clock.forward(43_200 - clock.now() % 86_400)
    yield
    clock.forward(before - clock._skew)


@asynccontextmanager
async def inbox_of(folder: Path, *, limits: Limits | None = None, **phones: Phone) -> AsyncIterator[Inbox]:
    inbox = Inbox(f"sqlite:{folder / 'inbox.db'}")
    inbox.source("whatsapp", preset="whatsapp-cloud", verify="none", verify_token="x", key="$.id")
    inbox.source("stripe", preset="stripe", verify="none", key="$.id")
    for name, phone in phones.items():
        inbox.sender(name, phone, retry=["0.01s"])  # type: ignore[arg-type]
    inbox.limits = limits or inbox.limits
    async with inbox.running():
        yield inbox


async def fill(inbox: Inbox, source: str, count: int) -> None:
    for n in range(count):
        await inbox.emit(source, "message.text", {"n": n}, key=f"{source}-{n}-{clock.now()}")


def text(n: int) -> Text:
    return Text(to="+55 11 99999-0001", text=f"Message {n}")


# -- stats -------------------------------------------------------------------------------------


async def test_messages_per_day_and_destination_retries_and_replays(tmp_path: Path) -> None:
    async with inbox_of(tmp_path, answers=Phone([busy(), closed()]), quiet=Phone()) as inbox:
        since = inbox.admin.moment("2h")
        before = await inbox.admin.stats(since)
        assert (before.last_replay_at, before.per_day) == (None, {"answers": {}, "quiet": {}})
        ids = [await inbox.send_message("answers", text(n), key=str(n)) for n in range(3)]
        await inbox.drain()
        (dead,) = (await inbox.admin.deliveries(Filter(event_id=EventId.parse(ids[0])))).items
        assert str(dead.category) == "permanent"
        await inbox.admin.replay_one(dead.id, actor="ana")
        await inbox.drain()
        counted = await inbox.admin.stats(since, "destination")
        today = f"{clock.now_utc():%Y-%m-%d}"
        assert counted.per_day == {"answers": {today: 3}, "quiet": {}}
        assert (counted.retries, counted.replays, counted.dead) == (1, 1, 0)
        assert counted.last_replay_at is not None
        assert counted.by is not None
        assert {word: counted.by["answers"][word] for word in ("delivered", "retries", "replays")} == {
            "delivered": 3, "retries": 1, "replays": 1,
        }  # fmt: skip
        said = encode(counted)
        assert (said.per_day, said.last_replay_at) == (counted.per_day, counted.last_replay_at)


async def test_the_command_shows_each_day(tmp_path: Path) -> None:
    async with inbox_of(tmp_path, answers=Phone()) as inbox:
        await inbox.send_message("answers", text(1), key="1")
        await inbox.drain()
    (tmp_path / "oncehook.toml").write_text(
        f"""
store = "sqlite:{tmp_path}/inbox.db"
[destination.answers.whatsapp]
api = "meta"
token = {{ env = "T" }}
phone_number_id = 1
"""
    )
    command = [sys.executable, "-m", "oncehook", "stats", "--by", "destination"]
    (tmp_path / "clock").write_text(str(clock._skew))
    env = {**os.environ, "T": "token", "NO_COLOR": "1", "ONCEHOOK_CLOCK": str(tmp_path / "clock")}
    ran = await asyncio.to_thread(
        subprocess.run, command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert re.search(rf"^day +answers\n{clock.now_utc():%Y-%m-%d}  1$", ran.stdout, re.MULTILINE), ran.stdout


# -- log ---------------------------------------------------------------------------------------


async def test_the_last_line_of_a_delivery_tells_how_it_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "oncehook.attempt")
    async with inbox_of(tmp_path, answers=Phone([busy(), None, busy(), closed()])) as inbox:
        for n in range(2):
            await inbox.send_message("answers", text(n), key=str(n))
        await inbox.drain()
    records = [record for record in caplog.records if record.name == "oncehook.attempt"]
    lines: list[dict[str, Any]] = [
        vars(record)["fields"] for record in records if not str(record.msg).startswith("attempt.summary")
    ]
    told = [{word: line.get(word) for word in ("attempts", "final_status", "category")} for line in lines]
    assert told == [
        {"attempts": None, "final_status": None, "category": "transient"},
        {"attempts": 2, "final_status": "done", "category": None},
        {"attempts": None, "final_status": None, "category": "transient"},
        {"attempts": 2, "final_status": "dead", "category": "permanent"},
    ]


# -- the daily volume --------------------------------------------------------------------------


def test_the_presets_of_whatsapp_have_a_usual_volume_and_no_other() -> None:
    usual = {name: presets.load(name).daily_volume for name in presets.names()}
    assert {name: volume for name, volume in usual.items() if volume} == dict.fromkeys(
        ["360dialog", "evolution-api", "evolution-go", "waha", "whatsapp-cloud"], 50
    )


async def volumes(inbox: Inbox) -> list[Watermark]:
    return [mark for mark in await inbox.admin.watermarks() if mark.name.startswith("daily_volume.")]


async def test_without_a_word_fifty_a_day_is_the_limit_of_whatsapp(tmp_path: Path) -> None:
    async with inbox_of(tmp_path) as inbox:
        await fill(inbox, "whatsapp", 50)
        await fill(inbox, "stripe", 60)
        assert await volumes(inbox) == [Watermark("daily_volume.whatsapp", 50, 50, crossed=False)]
        await fill(inbox, "whatsapp", 1)
        assert await volumes(inbox) == [Watermark("daily_volume.whatsapp", 51, 50, crossed=True)]


async def test_receipts_and_presence_are_no_volume(tmp_path: Path) -> None:
    """Whatever the way in, once each, and in the numbers as well as in the watermark."""
    inbox = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
    inbox.source("whatsapp", preset="whatsapp-cloud", secret="s", verify_token="x", budget="90s")
    inbox.source("go", preset="evolution-go", secret="s", budget="90s")
    inbox.source("orders", verify="none", key="$.id")
    async with inbox.running():
        for kind in ("message.text", "status.delivered", "batch"):  # that one has two messages and three statuses
            await send(inbox, "whatsapp", kind, repeat=2)
        for kind in ("Message", "Receipt", "Presence"):
            await send(inbox, "go", kind)
        await fill(inbox, "whatsapp", 2)
        await inbox.emit("whatsapp", "status.read", {}, key="read")
        await inbox.emit("orders", "order.paid", {}, key="o")
        assert {mark.name: mark.level for mark in await volumes(inbox)} == {
            "daily_volume.whatsapp": 5, "daily_volume.go": 1,
        }  # fmt: skip
        stats = await inbox.admin.stats(clock.now_utc() - timedelta(hours=1), "source")
        assert stats.volume_today == 7
        assert stats.by is not None
        assert {name: (of["volume_today"], of["total"]) for name, of in stats.by.items()} == {
            "whatsapp": (5, 10), "go": (1, 3), "orders": (1, 1),
        }  # fmt: skip
        assert [check.name for check in await inbox.check() if not check.ok] == []
    async with Inbox(f"sqlite:{tmp_path / 'inbox.db'}").running() as again:
        assert (await again.store.figures()).by_source["whatsapp"]["volume"] == 5


@pytest.mark.parametrize(
    ("said", "limits"),
    [
        ("{ whatsapp = 200, stripe = 5 }", {"whatsapp": 200, "stripe": 5}),
        ('{ whatsapp = "off" }', {}),
        ("{ whatsapp = 0 }", {}),
    ],
)
async def test_the_settings_say_another_number_or_none(said: str, limits: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "oncehook.toml").write_text(f"""
store = "sqlite:{tmp_path}/inbox.db"
[source.whatsapp]
preset = "whatsapp-cloud"
secret = {{ env = "S" }}
verify_token = {{ env = "S" }}
[source.stripe]
verify = "none"
[watermark]
daily_volume = {said}
""")
    inbox = Inbox.from_config(load(tmp_path / "oncehook.toml", {"S": "secret"}).config)
    async with inbox.running():
        assert {mark.name.partition(".")[2]: mark.limit for mark in await volumes(inbox)} == limits


async def test_it_is_told_once_a_day_in_the_log_and_stands_in_the_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "oncehook.arrival")
    async with inbox_of(tmp_path) as inbox:
        watch = inbox._build_sweep(works=False)._check_watermarks
        assert b'oncehook_watermark_crossed{watermark="daily_volume.whatsapp"} 1.0' not in await inbox.metrics()
        for day in (1, 2):
            await fill(inbox, "whatsapp", MANY)
            for _ in range(3):
                await watch()
            told = [record for record in caplog.records if vars(record).get("moment") == "watermark.crossed"]
            assert len(told) == day
            assert vars(told[-1])["fields"] == {"watermark": "daily_volume.whatsapp", "measured": MANY, "limit": 50}
            assert b'oncehook_watermark_crossed{watermark="daily_volume.whatsapp"} 1.0' in await inbox.metrics()
            clock.forward(86_400.0)
            await watch()
            assert b'oncehook_watermark_crossed{watermark="daily_volume.whatsapp"} 0.0' in await inbox.metrics()
