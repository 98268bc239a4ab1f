"""An outgoing message as an event: sent once per key, tried again, dead, and sent again only when a person says so."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncehook import clock
from oncehook.errors import ConfigError
from oncehook.event import Event
from oncehook.inbox import Inbox
from oncehook.model import Category, DeliveryStatus, EventId, Filter, Mark, StoredDelivery
from oncehook.settings import load
from oncehook.testing.standins import EvolutionApiStandIn, EvolutionGoStandIn, MetaStandIn
from oncehook.whatsapp import EvolutionApi, EvolutionGo, InvalidMessage, MetaCloud, NoMessage, Read, Sender, Text
from oncehook.whatsapp.outcomes import Reason, SendFailed
from tests.acceptance.conftest import make_engine
from tests.whatsapp.phone import HANG, Phone, busy, closed, silent

NUMBER = "+55 11 99999-0001"
HELLO = Text(to=NUMBER, text="Hello")


@asynccontextmanager
async def sending(place: Path | str, phone: Phone, **how: Any) -> AsyncIterator[Inbox]:
    inbox = Inbox(place if isinstance(place, str) else f"sqlite:{place / 'inbox.db'}")
    inbox.sender("answers", phone, **{"retry": ["0.01s"] * 3, **how})  # type: ignore[arg-type]
    async with inbox.running():
        yield inbox


async def delivery(inbox: Inbox, event_id: str) -> StoredDelivery:
    (found,) = (await inbox.admin.deliveries(Filter(event_id=EventId.parse(event_id)))).items
    return found


async def test_the_same_key_is_sent_once(tmp_path: Path) -> None:
    phone = Phone()
    async with sending(tmp_path, phone) as inbox:
        both = await asyncio.gather(*[inbox.send_message("answers", HELLO, key="order-42") for _ in range(20)])
        await inbox.drain()
        assert len(set(both)) == 1
        assert phone.given == [(HELLO, both[0])]
        event = await inbox.admin.event(EventId.parse(both[0]))
        kept = event.event
        assert (kept.source, kept.type, kept.subject, kept.key) == (
            "answers", "message.text", "5511999990001", "order-42",
        )  # fmt: skip
        (attempt,) = await inbox.admin.attempts(event.deliveries[0].id)
        assert str(attempt.evidence.answer).count("wamid.1") == 1


async def test_a_plain_emit_does_the_same(tmp_path: Path) -> None:
    phone = Phone()
    async with sending(tmp_path, phone) as inbox:
        message = {"to": NUMBER, "text": "Hello"}
        for _ in range(2):
            await inbox.emit("answers", "message.text", message, key="k", subject=NUMBER)
        await inbox.drain()
    assert phone.texts == ["Hello"]


async def test_only_a_person_sends_it_a_second_time(tmp_path: Path) -> None:
    phone = Phone([closed()])
    async with sending(tmp_path, phone) as inbox:
        event_id = await inbox.send_message("answers", HELLO, key="k")
        await inbox.drain()
        dead = await delivery(inbox, event_id)
        assert (dead.status, dead.category, dead.last_status) == (DeliveryStatus.dead, Category.permanent, 400)
        assert dead.last_error == "window_closed 131047: More than 24 hours have passed."
        await inbox.send_message("answers", HELLO, key="k")
        await inbox.drain()
        assert len(phone.given) == 1, "the key is used up"
        await inbox.admin.replay_one(dead.id, actor="ana")
        await inbox.drain()
        done = await delivery(inbox, event_id)
        assert (done.status, done.run, len(phone.given)) == (DeliveryStatus.done, 2, 2)
        assert done.last_replay_at is not None


async def test_a_flapping_network_delivers_on_the_second_attempt(tmp_path: Path) -> None:
    phone = Phone([silent()])
    async with sending(tmp_path, phone) as inbox:
        event_id = await inbox.send_message("answers", HELLO, key="k")
        await inbox.drain()
        done = await delivery(inbox, event_id)
        assert (done.status, done.attempts) == (DeliveryStatus.done, 2)
        assert {sent_as for _, sent_as in phone.given} == {event_id}, "under one id, so that an API can tell"


async def test_the_api_says_when_to_come_again(tmp_path: Path) -> None:
    phone = Phone([busy(retry_after=120.0)])
    async with sending(tmp_path, phone, retry=["1s", "10m"]) as inbox:
        event_id = await inbox.send_message("answers", HELLO, key="k")
        while (found := await delivery(inbox, event_id)).last_error is None:
            await asyncio.sleep(0.005)
        assert found.due_at is not None
        assert found.due_at > clock.now_utc() + timedelta(seconds=100)


@pytest.mark.parametrize(
    ("refusal", "holds_back"),
    [
        (Reason.invalid_number, False),
        (Reason.window_closed, False),
        (Reason.too_large, False),
        (Reason.unauthorized, True),
    ],
)
async def test_refused_recipients_do_not_hold_back_the_others(
    tmp_path: Path, refusal: Reason, holds_back: bool
) -> None:
    """Ten wrong numbers say nothing about the API; a wrong token does."""
    phone = Phone([SendFailed("Refused.", refusal, status=400) for _ in range(3)])
    async with sending(tmp_path, phone, breaker={"failures": 2, "open": "1h"}, concurrency=1) as inbox:
        for n in range(4):
            await inbox.send_message("answers", Text(to=f"+55 11 99999-000{n}", text=str(n)), key=f"k{n}")
        while not (level := (await inbox.admin.destination("answers")).level).open_until and len(phone.given) < 4:
            await asyncio.sleep(0.005)
        assert (len(phone.given), level.open_until is not None) == ((2, True) if holds_back else (4, False))


async def test_what_one_person_gets_comes_in_order(tmp_path: Path) -> None:
    phone = Phone([busy()])
    async with sending(tmp_path, phone) as inbox:
        spellings = [NUMBER, "0055 11 99999 0001", "5511999990001", "5511999990001@s.whatsapp.net"]
        for n, to in enumerate(spellings):
            await inbox.send_message("answers", Text(to=to, text=str(n)), key=f"k{n}")
        await inbox.drain()
    assert phone.texts == ["0", "0", "1", "2", "3"]


async def test_what_could_never_be_sent_is_refused_to_its_author(tmp_path: Path) -> None:
    async with sending(tmp_path, Phone()) as inbox:
        with pytest.raises(InvalidMessage):
            await inbox.send_message("answers", Text(to="12", text="Hello"), key="k")
        with pytest.raises(InvalidMessage):
            await inbox.send_message("answers", Text(to=NUMBER, text=""), key="k")
        with pytest.raises(ConfigError, match="goes to a sender"):
            await inbox.send_message("anwsers", HELLO, key="k")
        assert not (await inbox.admin.events(Filter())).items


async def test_a_key_is_left_out_only_by_name(tmp_path: Path) -> None:
    phone = Phone()
    async with sending(tmp_path, phone) as inbox:
        with pytest.raises(TypeError, match="key"):
            await inbox.send_message("answers", HELLO)  # type: ignore[call-arg]
        first = await inbox.send_message("answers", Read(message_id="wamid.in"), key=None)
        assert await inbox.send_message("answers", Read(message_id="wamid.in"), key=None) != first
        await inbox.drain()
        event = (await inbox.admin.event(EventId.parse(first))).event
        assert (event.type, event.subject, Mark.unkeyed in event.marks) == ("message.read", None, True)
    assert len(phone.given) == 2


async def test_a_source_routed_to_a_sender(tmp_path: Path) -> None:
    """n8n posts `{to, text}` to /in/outgoing."""
    phone = Phone()
    inbox = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
    inbox.source("outgoing", verify="none", key="$.id", subject="$.to", budget="60s")
    inbox.sender("answers", phone)  # type: ignore[arg-type]
    inbox.route("outgoing", "answers")
    async with inbox.running():
        for _ in range(2):
            body = b'{"id": "n8n-1", "to": "5511999990001", "text": "From a flow"}'
            await inbox.receive("outgoing", {}, body, peer="127.0.0.1")
        await inbox.drain()
    assert phone.texts == ["From a flow"]


async def test_arrivals_are_not_sent_because_of_a_name(tmp_path: Path) -> None:
    phone = Phone()
    inbox = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
    inbox.source("whatsapp", verify="none", key="$.id", budget="60s")
    inbox.sender("whatsapp", phone)  # type: ignore[arg-type]
    async with inbox.running():
        await inbox.receive("whatsapp", {}, b'{"id": "1", "to": "5511999990001", "text": "echo"}', peer="127.0.0.1")
        await inbox.drain()
        with pytest.raises(ConfigError):
            await inbox.send_message("whatsapp", HELLO, key="k")
    assert phone.given == []


async def test_stopping_in_the_middle_with_unsure_dead_leaves_it_to_a_person(tmp_path: Path) -> None:
    phone = Phone([HANG])
    inbox = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
    inbox.sender("answers", phone, unsure="dead")  # type: ignore[arg-type]
    await inbox.start()
    event_id = await inbox.send_message("answers", HELLO, key="k")
    await phone.began.wait()
    await inbox.stop(patience=0.01)
    async with sending(tmp_path, after := Phone(), unsure="dead") as again:
        await again.drain()
        found = await delivery(again, event_id)
        assert (found.status, after.given) == (DeliveryStatus.dead, [])
        assert str(found.last_error).startswith("unsure: the worker was stopped")


DYING = """
import asyncio, os, signal, sys
from oncehook.inbox import Inbox
from oncehook.whatsapp.messages import Text
from tests.whatsapp.phone import Phone

class Dying(Phone):
    async def attempt(self, message, *, id=None):
        print(id, flush=True)  # it has gone out
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    inbox = Inbox(sys.argv[1])
    inbox.sender("answers", Dying(), unsure=sys.argv[2])
    async with inbox.running():
        await inbox.send_message("answers", Text(to="+55 11 99999-0001", text="Hello"), key="k")
        await asyncio.sleep(600)

asyncio.run(main())
"""


def let_leases_lapse(url: str) -> None:
    """As when their ten seconds are over. On SQLite nobody waits for them: one process has the file."""
    address, _, schema = url.partition("?schema=")
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(f"UPDATE {schema}.heads SET due_at = now() WHERE leased")


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
@pytest.mark.parametrize(("unsure", "status", "sent"), [("retry", "done", 1), ("dead", "dead", 0)])
async def test_a_process_that_dies_while_sending(
    unsure: str, status: str, sent: int, engine: str, tmp_path: Path
) -> None:
    url = make_engine(engine, tmp_path).url
    died = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", DYING, url, unsure],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    if engine == "postgres":
        let_leases_lapse(url)
    async with sending(url, phone := Phone(), unsure=unsure) as inbox:
        await inbox.drain()
        found = await delivery(inbox, died.stdout.strip())
        assert (found.status, len(phone.given)) == (status, sent)
        if unsure == "dead":
            assert str(found.last_error).startswith("unsure: the worker died")
            await inbox.admin.replay_one(found.id, actor="ana")
            await inbox.drain()
            assert (await delivery(inbox, died.stdout.strip())).status is DeliveryStatus.done
            assert len(phone.given) == 1, "a person has judged"


# -- over the wire -----------------------------------------------------------------------------

SETTINGS = """
store = "sqlite:{folder}/inbox.db"

[source.outgoing]
verify = "none"
key = "$.id"
budget = "60s"

[destination.answers]
unsure = "{unsure}"
retry = ["0.05s", "0.05s"]
timeout = "60s"
allow_private = ["127.0.0.0/8"]

[destination.answers.whatsapp]
{api}

[[route]]
from = "outgoing"
to = "answers"
"""
FLOW = b'{"id": "n8n-1", "to": "+55 11 99999-0001", "text": "From a flow"}'


def configured(folder: Path, meta: MetaStandIn, unsure: str = "retry") -> Inbox:
    api = f"""
api = "meta"
base_url = "{meta.url}"
token = {{ env = "TOKEN" }}
phone_number_id = {meta.phone_number_id}
"""
    return described(folder, api, {"TOKEN": meta.token}, unsure)


def described(folder: Path, api: str, env: dict[str, str], unsure: str = "retry") -> Inbox:
    (folder / "oncehook.toml").write_text(SETTINGS.format(folder=folder, api=api, unsure=unsure))
    return Inbox.from_config(load(folder / "oncehook.toml", env).config)


async def test_from_settings_by_a_program_and_by_a_flow(tmp_path: Path) -> None:
    async with MetaStandIn() as meta, configured(tmp_path, meta).running() as inbox:
        for _ in range(2):
            event_id = await inbox.send_message("answers", HELLO, key="k")
            await inbox.receive("outgoing", {}, FLOW, peer="127.0.0.1")
        await inbox.drain()
        assert sorted((sent.to, sent.text) for sent in meta.sent) == [
            ("5511999990001", "From a flow"), ("5511999990001", "Hello"),
        ]  # fmt: skip
        (attempt,) = await inbox.admin.attempts((await delivery(inbox, event_id)).id)
        ours = next(sent for sent in meta.sent if sent.text == "Hello")
        assert str(attempt.evidence.answer).count(f"message_id: {ours.id}") == 1
        assert ours.body["biz_opaque_callback_data"] == event_id


async def test_the_line_is_cut_before_and_after(tmp_path: Path) -> None:
    """At least once: what may have been sent is sent again, unless a person is to judge."""
    async with MetaStandIn() as meta, configured(tmp_path, meta).running() as inbox:
        meta.fail(503)
        event_id = await inbox.send_message("answers", HELLO, key="refused")
        await inbox.drain()
        assert ((await delivery(inbox, event_id)).attempts, len(meta.sent)) == (2, 1)
        meta.accept_and_drop()
        event_id = await inbox.send_message("answers", HELLO, key="cut")
        await inbox.drain()
        assert ((await delivery(inbox, event_id)).status, len(meta.sent)) == (DeliveryStatus.done, 3)


async def test_with_unsure_dead_nothing_is_sent_twice(tmp_path: Path) -> None:
    async with MetaStandIn() as meta, configured(tmp_path, meta, "dead").running() as inbox:
        meta.accept_and_drop()
        event_id = await inbox.send_message("answers", HELLO, key="cut")
        await inbox.drain()
        found = await delivery(inbox, event_id)
        assert (found.status, len(meta.sent)) == (DeliveryStatus.dead, 1)
        assert str(found.last_error).startswith("unsure, unavailable")
        meta.fail(code=130429)
        event_id = await inbox.send_message("answers", HELLO, key="busy")
        await inbox.drain()
        assert ((await delivery(inbox, event_id)).status, len(meta.sent)) == (DeliveryStatus.done, 2)


async def test_an_expired_token_is_a_dead_letter_and_a_replay_sends_it(tmp_path: Path) -> None:
    async with MetaStandIn() as meta, configured(tmp_path, meta).running() as inbox:
        meta.expire_token()
        event_id = await inbox.send_message("answers", HELLO, key="k")
        await inbox.drain()
        found = await delivery(inbox, event_id)
        assert (found.status, found.last_status) == (DeliveryStatus.dead, 401)
        assert str(found.last_error).startswith("unauthorized 190: ")
        assert meta.token not in repr(await inbox.admin.attempts(found.id))
        meta.renew_token()
        await inbox.admin.replay_one(found.id, actor="ana")
        await inbox.drain()
        assert [sent.text for sent in meta.sent] == ["Hello"]


async def test_an_instance_that_comes_back(tmp_path: Path) -> None:
    with EvolutionGoStandIn() as go, EvolutionApiStandIn() as evolution:
        apis = {
            "go": f'api = "evolution-go"\nbase_url = "{go.url}"\ntoken = {{ env = "TOKEN" }}',
            "api": f'api = "evolution-api"\nbase_url = "{evolution.url}"\napi_key = {{ env = "KEY" }}'
            '\ninstance = "sales"',
        }
        for name, standin in (("go", go), ("api", evolution)):
            (tmp_path / name).mkdir()
            inbox = described(tmp_path / name, apis[name], {"TOKEN": go.token, "KEY": evolution.api_key})
            async with inbox.running():
                standin.fail(500)
                event_id = await inbox.send_message("answers", HELLO, key="k")
                await inbox.drain()
                found = await delivery(inbox, event_id)
                assert (found.status, found.attempts) == (DeliveryStatus.done, 2), found.last_error
                assert [sent.text for sent in standin.sent] == ["Hello"]


# -- the page ----------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs/how-to/whatsapp-answers.md").read_text()


@pytest.mark.parametrize("customer", ["5511999990001", "US.13491208655302741918"], ids=["by number", "by user id"])
async def test_the_program_of_the_page_answers_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, customer: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with MetaStandIn(secret="app-secret", token="EAAG") as meta:
        near = f'"EAAG", "{meta.phone_number_id}", base_url="{meta.url}", allow_private=True'
        assert '"EAAG…", "106540352242922"' in program
        names: dict[str, Any] = {"__name__": "page"}
        exec(compile(program.replace('"EAAG…", "106540352242922"', near), "page", "exec"), names)
        inbox: Inbox = names["inbox"]
        inbox.sources["whatsapp"].settings.budget = 60.0
        async with inbox.running():
            for arrival in meta.signed(meta.message(from_=customer, text="Where is it?")) * 2:
                await inbox.receive("whatsapp", arrival.headers, arrival.body)
            await inbox.drain()
        assert [(sent.to, sent.text) for sent in meta.sent] == [(customer, "On its way")]


def near(standin: Any) -> Sender:
    if isinstance(standin, MetaStandIn):
        return MetaCloud(standin.token, standin.phone_number_id, base_url=standin.url, allow_private=True)
    if isinstance(standin, EvolutionApiStandIn):
        return EvolutionApi(standin.url, standin.api_key, "sales", allow_private=True)
    return EvolutionGo(standin.url, standin.token, allow_private=True)


@pytest.mark.parametrize("make", [MetaStandIn, EvolutionApiStandIn, EvolutionGoStandIn], ids=lambda make: make.preset)
async def test_one_handler_answers_over_every_api(tmp_path: Path, make: Any) -> None:
    with make() as standin:
        inbox = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
        inbox.source("phone", preset=make.preset, secret=standin.secret, verify_token="hello", budget=60.0)
        inbox.sender("answers", near(standin))
        refused: list[Exception] = []

        @inbox.on("phone")
        async def reply(event: Event) -> None:
            try:
                message = event.whatsapp
            except NoMessage as error:
                refused.append(error)
                raise
            await inbox.send_message("answers", message.reply_to(f"{message.text}?"), key=event.idempotency_key)

        async with inbox.running():
            read = standin.receipt("3EB0") if make is EvolutionGoStandIn else standin.status("3EB0", "READ")
            for hook in (standin.message(from_="5511999990001", text="Hi"), read):
                for arrival in standin.signed(hook):
                    await inbox.receive("phone", arrival.headers, arrival.body)
            await inbox.drain()
            (dead,) = (await inbox.admin.deliveries(Filter(status=DeliveryStatus.dead))).items
        assert [(sent.to, sent.text) for sent in standin.sent] == [("5511999990001", "Hi?")]
        assert [getattr(error, "code", "") for error in refused] == ["no_message"]
        assert (dead.category, dead.attempts) == (Category.permanent, 1)


def test_the_settings_of_the_page_are_good(tmp_path: Path) -> None:
    (tmp_path / "oncehook.toml").write_text("\n".join(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)))
    config = load(tmp_path / "oncehook.toml", secrets=False).config
    assert set(config.destination) == {"answers", "crm"}
    assert config.watermark.daily_volume == {"whatsapp": 500}
