"""Every sender against its stand-in: two readings of one API, written apart, must agree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from oncehook.testing.standins import EvolutionApiStandIn, EvolutionGoStandIn, MetaStandIn
from oncehook.whatsapp.evolution_api import EvolutionApi
from oncehook.whatsapp.evolution_go import EvolutionGo
from oncehook.whatsapp.meta import MetaCloud
from oncehook.whatsapp.outcomes import Reason, SendFailed
from oncehook.whatsapp.sender import Sender
from tests.whatsapp.scripted import let_time_pass

TO = "5511988880142"
Pair = tuple[Any, Sender]


def sender_for(standin: Any, **settings: Any) -> Sender:
    settings = {"allow_private": True, "timeout": 60.0, **settings}
    if isinstance(standin, MetaStandIn):
        return MetaCloud(standin.token, standin.phone_number_id, base_url=standin.url, **settings)
    if isinstance(standin, EvolutionApiStandIn):
        return EvolutionApi(standin.url, standin.api_key, standin.instance, **settings)
    return EvolutionGo(
        standin.url, standin.token, instance=standin.instance_id, admin_key=standin.admin_key, **settings
    )


KINDS = [MetaStandIn, EvolutionApiStandIn, EvolutionGoStandIn]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with request.param() as standin, sender_for(standin) as sender:
        yield standin, sender


async def reason(sender: Sender) -> SendFailed:
    with pytest.raises(SendFailed) as failed:
        await sender.send_text(TO, "Hi")
    return failed.value


async def test_a_text_goes_out_under_the_id_that_is_told(pair: Pair) -> None:
    standin, sender = pair
    sent = await sender.send_text(f"+{TO}", "Olá")
    [taken] = standin.sent
    assert (sent.message_id, taken.to, taken.type, taken.text) == (taken.id, TO, "text", "Olá")


@pytest.mark.parametrize("kind", ["image", "video", "audio", "document", "sticker"])
async def test_media_by_link(pair: Pair, kind: Any) -> None:
    standin, sender = pair
    sent = await sender.send_media(TO, kind, link="https://files.example/a.bin")
    assert [(taken.id, taken.type) for taken in standin.sent] == [(sent.message_id, kind)]


async def test_reactions_and_reading(pair: Pair) -> None:
    standin, sender = pair
    await sender.react(TO, "3EB0ABC", "👍")
    await sender.mark_read("3EB0ABC", TO)
    assert [taken.type for taken in standin.sent] == ["reaction"]
    assert standin.read == ["3EB0ABC"]


async def test_an_expired_token(pair: Pair) -> None:
    standin, sender = pair
    standin.expire_token()
    assert (await reason(sender)).reason is Reason.unauthorized
    assert standin.sent == []


async def test_a_number_that_nobody_has(pair: Pair) -> None:
    standin, sender = pair
    standin.not_on_whatsapp(TO)
    assert (await reason(sender)).reason is Reason.invalid_number


@pytest.mark.parametrize(("status", "why"), [(429, Reason.rate_limited), (503, Reason.unavailable)])
async def test_passing_failures(pair: Pair, status: int, why: Reason) -> None:
    standin, sender = pair
    standin.fail(status)
    assert (await reason(sender)).reason is why
    await sender.send_text(TO, "Hi")
    assert len(standin.sent) == 1


@pytest.mark.parametrize("fault", ["drop_connection", "accept_and_drop"])
async def test_without_an_answer_nobody_can_know(pair: Pair, fault: str) -> None:
    standin, sender = pair
    getattr(standin, fault)()
    assert (await reason(sender)).unsure
    assert len(standin.sent) == (fault == "accept_and_drop")
    assert len(standin.requests) == 1  # and it was not sent again behind our back


def hang(standin: Any) -> None:
    """It takes the next call and never answers: the caller's time is over as soon as the call has come."""
    loop, wait = asyncio.get_running_loop(), standin.wait

    def begin_to_wait(seconds: float | None) -> None:
        loop.call_soon_threadsafe(let_time_pass, loop)
        wait(seconds)

    standin.wait = begin_to_wait
    standin.hang()


@pytest.mark.parametrize("kind", KINDS)
async def test_silence_is_unsure(kind: type[Any]) -> None:
    async with kind() as standin, sender_for(standin) as sender:
        hang(standin)
        assert (await reason(sender)).unsure


@pytest.mark.parametrize("kind", [EvolutionApiStandIn, EvolutionGoStandIn])
async def test_a_phone_that_is_offline(kind: type[Any]) -> None:
    async with kind() as standin, sender_for(standin) as sender:
        standin.go_offline()
        assert (await reason(sender)).reason is Reason.instance_offline
        with pytest.raises(SendFailed) as failed:
            await sender.send_media(TO, "image", link="https://files.example/a.png")
        assert failed.value.reason is Reason.instance_offline
        standin.go_online()
        await sender.send_text(TO, "Hi")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (4, Reason.rate_limited),
        (80007, Reason.rate_limited),
        (130429, Reason.rate_limited),
        (131048, Reason.rate_limited),
        (131056, Reason.rate_limited),
        (131047, Reason.window_closed),
        (131026, Reason.invalid_number),
        (190, Reason.unauthorized),
        (10, Reason.unauthorized),
        (131000, Reason.unavailable),
        (131016, Reason.unavailable),
        (2, Reason.unavailable),
    ],
)
async def test_metas_codes(code: int, why: Reason) -> None:
    async with MetaStandIn() as meta, sender_for(meta) as sender:
        meta.fail(code=code)
        failed = await reason(sender)
        assert (failed.reason, failed.api_code) == (why, str(code))


async def test_a_template_passes_a_closed_window() -> None:
    async with MetaStandIn() as meta, sender_for(meta) as sender:
        meta.close_window(TO)
        assert (await reason(sender)).reason is Reason.window_closed
        await sender.send_template(TO, "hello_world")
        assert [sent.type for sent in meta.sent] == ["template"]
