"""The example `whatsapp-bot` as a whole: `oncehook serve app:inbox` as a process, WhatsApp's APIs and n8n as stand-ins.

Everything goes over real HTTP, through tunnels that hand hooks on twice and are away at first.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from oncehook.inbox import Inbox
from oncehook.model import Filter, StoredDelivery
from oncehook.samples import Answer
from oncehook.settings import load
from oncehook.testing import TestInbox
from oncehook.testing.standins import MetaStandIn, Tunnel
from oncehook.whatsapp.storage import S3Files
from tests.acceptance.conftest import Engine, make_engine
from tests.contrib.running import ROOT, Database, Example, database
from tests.waiting import until
from tests.whatsapp.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, fresh_prefix, shared_s3

__all__ = ["database"]

FOLDER = ROOT / "examples" / "whatsapp-bot"
ANA, RUI = "5511988880142", "5511966660177"
APIS = ["meta", "evolution", "go"]


def said_by_seaweed() -> dict[str, str]:
    return {
        "ONCEHOOK_S3_BUCKET": BUCKET,
        "ONCEHOOK_S3_ENDPOINT": shared_s3().endpoint,
        "ONCEHOOK_S3_ACCESS_KEY": ACCESS_KEY,
        "ONCEHOOK_S3_SECRET_KEY": SECRET_KEY,
        "ONCEHOOK_S3_PREFIX": fresh_prefix(),
    }


# -- as its README says ------------------------------------------------------------------------


@pytest.mark.parametrize("real", [False, True], ids=["sqlite and stand-in", "postgresql and a real s3 server"])
def test_the_bot_among_stand_ins(tmp_path: Path, database: Database, real: bool) -> None:
    env = {"STORE": database.url, **said_by_seaweed()} if real else {}
    with Example("whatsapp-bot", tmp_path, env) as example:
        said = example.run("python run_local.py").splitlines()
    twice = "was answered 502, 200; handed on 2 times, sent: "
    assert said[:6] == [
        *[f'{name}: "Hi" {twice}text' for name in APIS],
        *[f'{name}: "Send me the price list" {twice}document' for name in APIS],
    ]
    size = (FOLDER / "price-list.csv").stat().st_size
    assert said[6:10] == [
        f"WhatsApp fetches price-list.csv: {size} bytes",
        "a batch of 4: 4 events; n8n was told sent and read",
        "evolution: the phone was offline, and the answer went out when it was back",
        "meta: the token had expired; after a replay 1 answer arrived",
    ]
    assert re.fullmatch(r"n8n ran 11 times, ([1-9]|10|11) of them on attempt 2 or later", said[10])
    assert said[11:] == ["phones rang 9 times"]


def test_the_readme_shows_what_it_prints() -> None:
    shown = re.findall(r"```text\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)[0].splitlines()
    program = (FOLDER / "run_local.py").read_text()
    for line in shown:
        words = re.split(r'\d+|"[^"]*"|^\w+:|sent and read|text$', line)
        assert all(word.strip() in program for word in words if len(word) > 12), line


def test_the_settings_are_good() -> None:
    config = load(FOLDER / "oncehook.toml", secrets=False).config
    assert set(config.source) == set(APIS)
    assert set(config.destination) == {"n8n", *(f"answers-{name}" for name in APIS)}


@pytest.mark.parametrize("kept", APIS)
def test_two_of_the_three_can_be_deleted(kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file says so; the program must not mind."""
    head, *parts = re.split(r"(?m)^# -- .* -+$", (FOLDER / "oncehook.toml").read_text())
    chosen = [part for part in parts if f"[source.{kept}]" in part or "[source." not in part]
    assert len(chosen) == 2
    (tmp_path / "oncehook.toml").write_text("".join([head, *chosen]))
    (tmp_path / "app.py").write_text((FOLDER / "app.py").read_text())
    for variable in re.findall(r'env = "(\w+)"', (FOLDER / "oncehook.toml").read_text()):
        monkeypatch.setenv(variable, "said")
    for variable, value in said_by_seaweed().items():
        monkeypatch.setenv(variable, value)
    app = module(tmp_path / "app.py")
    assert (list(app.inbox.sources), set(app.inbox.destinations)) == ([kept], {"n8n", f"answers-{kept}", "answer"})
    assert isinstance(app.sender_of(f"answers-{kept}").files, S3Files)


# -- through tunnels ---------------------------------------------------------------------------


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # its data classes look for themselves there
    spec.loader.exec_module(made)
    return made


class Served:
    """The bot at work, and everything around it."""

    def __init__(self, town: Any, url: str, engine: Engine) -> None:
        self.town, self.url, self.engine = town, url, engine

    def standin(self, name: str) -> Any:
        return getattr(self.town, name)

    async def deliver(self, name: str, *hooks: Any, **how: Any) -> list[Answer]:
        answers: list[Answer] = await self.standin(name).deliver(f"{self.url}/in/{name}", *hooks, **how)
        return answers

    async def worked_off(self) -> None:
        """Until nothing is left to do, also nothing of which nobody outside hears."""
        await until(lambda: self.engine.rows("SELECT count(*) FROM heads") == [(0,)])


@pytest.fixture(params=["sqlite", "postgres"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    return make_engine(request.param, tmp_path)


@asynccontextmanager
async def serving(engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setenv("STORE", engine.url)
    for name in APIS:
        monkeypatch.setenv(f"ONCEHOOK_SOURCE__{name.upper()}__BUDGET", "60s")
    local = module(FOLDER / "run_local.py")
    with ExitStack() as stack:
        town = await asyncio.to_thread(local.Town, stack)
        running = local.bot(town.environment(str(folder)), folder / "log")
        url = await asyncio.to_thread(running.__enter__)
        try:
            yield Served(town, url, engine)
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)
    assert "Traceback" not in (folder / "log").read_text()


async def kept(engine: Engine) -> dict[str, list[StoredDelivery]]:
    """What the store holds when the bot has stopped, by destination; and its laws hold."""
    inbox = Inbox(engine.url)
    async with inbox.running(work=False):
        assert {one.name: one.detail for one in await inbox.check() if not one.ok} == {}
        found: dict[str, list[StoredDelivery]] = {}
        for one in reversed((await inbox.admin.deliveries(Filter())).items):
            found.setdefault(one.destination, []).append(one)
        return found


@pytest.mark.parametrize("name", APIS)
async def test_one_execution_and_one_message_on_attempt_two(
    name: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every hook comes twice, and every line is down at first: in, to n8n, and to WhatsApp."""
    cut = engine.name == "sqlite"  # a line that is cut, and one that answers 502
    async with serving(engine, tmp_path, monkeypatch) as served:
        served.town.way_out.cut = cut
        standin = served.standin(name)
        bad_moment = "drop_connection" if cut else "fail"
        getattr(standin, bad_moment)()
        with Tunnel(served.url, copies=2, flap_every=2, flap_first=True, cut=cut) as way_in:
            hook = standin.message(from_=ANA, text="Hi")
            first, second = await standin.deliver(f"{way_in.url}/in/{name}", hook, retries=3)
            assert (first.status, second.json()["status"]) == (0 if cut else 502, "duplicate")
            assert (way_in.flapped, way_in.handed_on) == (1, 2)
        again = await served.deliver(name, hook, copies=3)
        assert {answer.json()["status"] for answer in again} == {"duplicate"}
        await served.worked_off()
    [sent] = standin.sent
    [execution] = served.town.n8n.executions
    assert (sent.to, sent.type) == (ANA, "text")
    assert execution.headers["oncehook-attempt"] == "2"
    found = await kept(engine)
    ended = {place: [(one.status.value, one.attempts) for one in ones] for place, ones in found.items()}
    assert ended == {"answer": [("done", 1)], "n8n": [("done", 2)], f"answers-{name}": [("done", 2)]}


async def test_statuses_that_overtake_each_other(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`read` comes before `delivered`: what is behind already is kept, and told to nobody."""
    async with serving(engine, tmp_path, monkeypatch) as served:
        served.town.way_out.flap_every = 0
        meta, evolution, go, n8n = served.town.meta, served.town.evolution, served.town.go, served.town.n8n
        batch = [meta.status("wamid.1", word, to=ANA) for word in ("sent", "read", "delivered")]
        other = meta.status("wamid.2", "delivered", to=ANA)  # another message of the same customer
        [answer] = await served.deliver("meta", *batch, other)
        assert answer.json()["accepted"] == 4
        for word in ("READ", "DELIVERY_ACK"):
            await served.deliver("evolution", evolution.status("3EB01", word, to=ANA), copies=2)
        await served.deliver("go", go.receipt("3EB01", "3EB02", state="Read", from_=ANA))
        await served.deliver("go", go.receipt("3EB01", "3EB03", state="Delivered", from_=ANA))
        await served.worked_off()
    told = [run.body for run in n8n.executions]
    values = [body["entry"][0]["changes"][0]["value"]["statuses"][0] for body in told if "entry" in body]
    assert [(value["id"], value["status"]) for value in values] == [
        ("wamid.1", "sent"), ("wamid.1", "read"), ("wamid.2", "delivered"),
    ]  # fmt: skip
    assert [body["data"]["status"] for body in told if body.get("event") == "messages.update"] == ["READ"]
    receipts = [(body["data"]["MessageIDs"], body["state"]) for body in told if body.get("event") == "Receipt"]
    assert receipts == [(["3EB01"], "Read"), (["3EB02"], "Read"), (["3EB03"], "Delivered")]
    notes = [one.note for one in (await kept(engine))["n8n"] if one.note]
    assert [str(getattr(note, "value", note)) for note in notes] == ["stale"] * 3


async def test_who_is_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ourselves, groups and the status of friends: a bot that answers those talks to itself, or to everybody."""
    async with serving(make_engine("sqlite", tmp_path), tmp_path, monkeypatch) as served:
        served.town.way_out.flap_every = 0
        evolution, go, n8n = served.town.evolution, served.town.go, served.town.n8n
        places = [ANA, "120363041234567890@g.us", "status@broadcast"]
        for standin, name in ((evolution, "evolution"), (go, "go")):
            hooks = [standin.message(from_=place, text="Hi", from_me=place == ANA) for place in places]
            await served.deliver(name, *hooks, standin.message(from_=RUI, text="Hi"))
        await served.worked_off()
    assert len(n8n.executions) == 8
    assert [[sent.to for sent in standin.sent] for standin in (evolution, go)] == [[RUI], [RUI]]


async def test_the_price_list_is_uploaded_once_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(make_engine("sqlite", tmp_path), tmp_path, monkeypatch) as served:
        meta: MetaStandIn = served.town.meta
        hooks = [meta.message(from_=number, text="the PRICE LIST please") for number in (ANA, RUI, ANA)]
        await served.deliver("meta", hooks[0])
        await until(lambda: meta.sent)
        await served.deliver("meta", *hooks, copies=2)
        await until(lambda: len(meta.sent) == 3)
        assert len([one for one in served.town.s3.requests if one.method == "PUT"]) == 1
        assert len(served.town.s3.objects) == 1
    documents = [sent.body["document"] for sent in meta.sent]
    assert {one["filename"] for one in documents} == {"price-list.csv"}
    assert {sent.body["context"]["message_id"] for sent in meta.sent} == {hook.id for hook in hooks}


async def test_a_handler_that_runs_again_answers_once(
    inbox: TestInbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash, or because somebody replays it: the key of the answer is known."""
    local = module(FOLDER / "run_local.py")
    with ExitStack() as stack:
        town = local.Town(stack)
        town.way_out.flap_every = 0
        for name, value in town.environment(str(tmp_path)).items():
            monkeypatch.setenv(name, value)
        inbox.use(module(FOLDER / "app.py").inbox)
        async with inbox.served() as url:
            for name in APIS:
                standin = getattr(town, name)
                await standin.deliver(f"{url}/{name}", standin.message(from_=ANA, text="Hi"), copies=2)
            await inbox.drain()
            for one in await inbox.deliveries("answer"):
                await inbox.admin.replay_one(one.id, actor="ana", force=True)
            await inbox.drain()
            assert [(one.status, one.run) for one in await inbox.deliveries("answer")] == [("done", 2)] * 3
        assert [len(getattr(town, name).sent) for name in APIS] == [1, 1, 1]
        assert len(town.n8n.executions) == 3
