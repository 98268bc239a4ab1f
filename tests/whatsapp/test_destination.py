"""A sender as a destination: what it makes of a message, of an answer, and of not knowing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from oncehook.categories import FailureRules
from oncehook.destinations.base import Result, Terms
from oncehook.errors import ConfigError
from oncehook.model import ANSWER_KEPT, Category, DeliveryPreview, Lease, Options, Priority
from oncehook.whatsapp.destination import SenderDestination, Unsure, read_subject
from oncehook.whatsapp.messages import Media, Text, type_of
from oncehook.whatsapp.outcomes import Reason, SendFailed, Sent
from tests.leases import make_lease
from tests.whatsapp.phone import HANG, Phone, busy, closed, silent

EVENT_ID = "evt_0199a4e80a0070008000000000000000"
BODY = b'{"to": "+55 11 99999-0001", "text": "On its way"}'


def lease(body: bytes = BODY, *, priority: Priority = Priority.live, options: Options = Options.none) -> Lease:
    event_id = bytes.fromhex(EVENT_ID[4:])
    return make_lease(event_id, source="answers", body=body, run=2, options=options, priority=priority)


async def attempt(
    answer: Any = None,
    *,
    unsure: Unsure = "retry",
    timeout: float = 5.0,
    rules: FailureRules = FailureRules(),  # noqa: B008 - it does not change
    **how: Any,
) -> Result:
    phone = Phone([answer] if answer is not None else [])
    terms = Terms(timeout=timeout, rules=rules)
    destination = SenderDestination("answers", phone, terms, unsure=unsure)  # type: ignore[arg-type]
    await destination.open()
    return await destination.attempt(lease(**how))


async def test_it_is_sent_once_under_a_stable_id_and_the_message_id_is_noted() -> None:
    phone = Phone()
    destination = SenderDestination("answers", phone)  # type: ignore[arg-type]
    await destination.open()
    result = await destination.attempt(lease())
    assert phone.given == [(Text(to="+55 11 99999-0001", text="On its way"), EVENT_ID)]
    assert (result.category, result.evidence.status) == (None, 200)
    assert result.evidence.answer == b'message_id: wamid.1\n{"messages":[]}'
    await destination.attempt(lease(options=Options.fresh_id))
    assert phone.given[1][1] == f"{EVENT_ID}.2", "a person asked for a new id"
    await destination.close()
    assert not phone.is_open


async def test_what_is_shown_of_it() -> None:
    destination = SenderDestination("answers", Phone())  # type: ignore[arg-type]
    assert (destination.kind, destination.address) == ("sender", "meta https://graph.example/123")
    assert destination.preview(BODY) == DeliveryPreview("+55 11 99999-0001", "On its way")
    assert destination.preview(b'{"hello": "world"}') is None
    long = destination.preview(b'{"to": "5511999990001", "text": "%s"}' % (b"a\\nb" * 400))
    assert long is not None
    assert (len(long.text), "\n" in long.text) == (300, False)


async def test_a_refusal_tells_reason_code_status_and_answer() -> None:
    result = await attempt(closed())
    assert result.category is Category.permanent
    assert result.evidence.error == "window_closed 131047: More than 24 hours have passed."
    assert (result.evidence.status, result.evidence.answer) == (400, b'{"error":{}}')


async def test_what_may_pass_is_tried_again_when_the_api_says() -> None:
    result = await attempt(busy(retry_after=90.0))
    assert (result.category, result.retry_after) == (Category.transient, 90.0)


@pytest.mark.parametrize("reason", Reason)
async def test_the_category_is_that_of_the_reason(reason: Reason) -> None:
    failure = SendFailed("It was not sent.", reason)
    assert (await attempt(failure)).category is failure.category


async def test_a_status_that_the_settings_name_counts_before_the_apis_reason() -> None:
    rules = FailureRules(transient=frozenset({400}))
    assert (await attempt(closed(), rules=rules)).category is Category.transient


async def test_what_somebody_elses_sender_raises_has_its_category() -> None:
    assert (await attempt(ConnectionResetError())).category is Category.transient
    assert (await attempt(KeyError("to"))).category is Category.permanent


@pytest.mark.parametrize("body", [b"", b"[]", b'{"to": "5511999990001"}', b'{"to": "5511999990001", "text": " "}'])
async def test_what_is_no_message_is_given_up_at_once(body: bytes) -> None:
    result = await attempt(body=body)
    assert result.category is Category.permanent
    assert str(result.evidence.error).startswith("message_invalid: ")


async def test_a_long_answer_is_cut_behind_the_message_id() -> None:
    result = await attempt(Sent("wamid.X", 200, b"x" * 9000))
    assert result.evidence.answer is not None
    assert len(result.evidence.answer) == ANSWER_KEPT
    assert result.evidence.answer.startswith(b"message_id: wamid.X\nxxx")


async def test_an_error_nobody_thought_of_is_told_without_its_words() -> None:
    result = await attempt(RuntimeError("token EAAG-secret"))
    assert (result.category, result.evidence.error) == (Category.unknown, "sending failed: RuntimeError")


# -- not knowing -------------------------------------------------------------------------------


async def test_silence_is_tried_again_unless_said_otherwise() -> None:
    assert (await attempt(silent())).category is Category.transient
    assert (await attempt(HANG, timeout=0.05)).category is Category.transient
    assert (await attempt(priority=Priority.quarantined)).category is None, "sent again after a crash"


async def test_with_unsure_dead_silence_is_for_a_person_to_judge() -> None:
    for answer in (silent(), HANG, RuntimeError()):
        result = await attempt(answer, unsure="dead", timeout=0.05)
        assert result.category is Category.permanent
        assert str(result.evidence.error).startswith("unsure, ")


async def test_with_unsure_dead_what_was_surely_not_sent_is_tried_again() -> None:
    down = SendFailed("No connection.", Reason.unavailable, unsure=False)
    assert (await attempt(down, unsure="dead")).category is Category.transient
    assert (await attempt(busy(), unsure="dead")).category is Category.transient


async def test_with_unsure_dead_nothing_is_sent_after_a_crash() -> None:
    phone = Phone()
    destination = SenderDestination("answers", phone, unsure="dead")  # type: ignore[arg-type]
    await destination.open()
    result = await destination.attempt(lease(priority=Priority.quarantined))
    assert (result.category, phone.given) == (Category.permanent, [])
    assert destination.crash_tolerance == 0, (
        "so that whatever was under way when a process died comes back as a suspect"
    )


@pytest.mark.parametrize("unsure", ["retry", "dead"])
async def test_an_attempt_that_is_stopped(unsure: Unsure) -> None:
    phone = Phone([HANG])
    destination = SenderDestination("answers", phone, unsure=unsure)  # type: ignore[arg-type]
    await destination.open()
    task = asyncio.create_task(destination.attempt(lease()))
    await phone.began.wait()
    task.cancel()
    if unsure == "retry":
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        assert (await task).category is Category.permanent


def test_unsure_is_one_of_two_words() -> None:
    with pytest.raises(ConfigError, match='"retry" or "dead"'):
        SenderDestination("answers", Phone(), unsure="perhaps")  # type: ignore[arg-type]


# -- as an event -------------------------------------------------------------------------------


def test_a_message_as_an_event() -> None:
    picture = Media(to="11 99999-0001", kind="image", link="https://example.org/a.jpg")
    assert (type_of(picture), read_subject(picture, "55")) == ("message.image", "5511999990001")
    assert type_of(Text(to="1", text="x")) == "message.text"
