"""What a test can script into any stand-in, seen through a client that knows nothing of it."""

from __future__ import annotations

import http.client
import threading
import time

import pytest

from oncehook.errors import ConfigError
from oncehook.testing.standins import EvolutionApiStandIn, EvolutionGoStandIn, MetaStandIn, N8nStandIn, StandIn
from tests.testing.calling import Said, call

CUT = (ConnectionError, http.client.HTTPException)


def send(standin: StandIn, *, timeout: float = 60.0) -> Said:
    """One right call to whichever it is."""
    if isinstance(standin, MetaStandIn):
        message = {"messaging_product": "whatsapp", "to": "5511988880142", "type": "text", "text": {"body": "Hi"}}
        url = f"{standin.url}/v23.0/{standin.phone_number_id}/messages"
        return call(url, message, {"authorization": f"Bearer {standin.token}"}, timeout=timeout)
    message = {"number": "5511988880142", "text": "Hi"}
    if isinstance(standin, EvolutionApiStandIn):
        url = f"{standin.url}/message/sendText/{standin.instance}"
        return call(url, message, {"apikey": standin.api_key}, timeout=timeout)
    if isinstance(standin, EvolutionGoStandIn):
        return call(f"{standin.url}/send/text", message, {"apikey": standin.token}, timeout=timeout)
    assert isinstance(standin, N8nStandIn)
    return call(standin.webhook(), message, timeout=timeout)


def taken(standin: StandIn) -> int:
    return len(standin.executions if isinstance(standin, N8nStandIn) else standin.sent)


KINDS = [MetaStandIn, EvolutionApiStandIn, EvolutionGoStandIn, N8nStandIn]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> type[StandIn]:
    return request.param


def test_a_right_call_is_taken(kind: type[StandIn]) -> None:
    with kind() as standin:
        assert send(standin).status in (200, 201)
        assert (taken(standin), len(standin.requests)) == (1, 1)


async def test_in_a_coroutine_too(kind: type[StandIn]) -> None:
    async with kind() as standin:
        assert send(standin).status in (200, 201)


def test_failures_come_in_the_order_said_and_then_it_is_well(kind: type[StandIn]) -> None:
    with kind() as standin:
        standin.fail(503)
        standin.fail(502, times=2)
        assert [send(standin).status for _ in range(3)] == [503, 502, 502]
        assert taken(standin) == 0
        assert send(standin).status in (200, 201)
        assert (taken(standin), len(standin.requests)) == (1, 4)


def test_for_ever_means_until_it_recovers(kind: type[StandIn]) -> None:
    with kind() as standin:
        standin.fail(500, times=None)
        assert [send(standin).status for _ in range(4)] == [500] * 4
        standin.recover()
        assert send(standin).status in (200, 201)


def test_a_dropped_connection_takes_nothing(kind: type[StandIn]) -> None:
    with kind() as standin:
        standin.drop_connection()
        with pytest.raises(CUT):
            send(standin)
        assert (taken(standin), len(standin.requests)) == (0, 1)


def test_accepted_without_an_answer_is_taken(kind: type[StandIn]) -> None:
    with kind() as standin:
        standin.accept_and_drop()
        with pytest.raises(CUT):
            send(standin)
        assert taken(standin) == 1


def test_hanging_lasts_until_the_caller_gives_up_and_takes_nothing(kind: type[StandIn]) -> None:
    with kind() as standin:
        standin.hang()
        with pytest.raises(TimeoutError):
            send(standin, timeout=0.2)
        assert taken(standin) == 0
    # and what hangs does not keep it from stopping


def test_a_delayed_answer_is_the_right_one(kind: type[StandIn]) -> None:
    with kind() as standin:
        standin.delay(0.2)
        asked_at = time.monotonic()
        assert send(standin).status in (200, 201)
        assert time.monotonic() - asked_at >= 0.2
        assert (taken(standin), len(standin.requests)) == (1, 1)


def test_stopping_ends_kept_connections() -> None:
    standin = N8nStandIn().start()
    connection = http.client.HTTPConnection("127.0.0.1", int(standin.url.rpartition(":")[2]), timeout=60)
    connection.request("POST", "/webhook/orders", b"{}")
    connection.getresponse().read()  # and the connection stays open, as clients keep them
    standin.stop()
    standin.stop()  # twice is once
    assert not [thread for thread in threading.enumerate() if "stand-in" in thread.name]
    connection.close()
    with pytest.raises(ConfigError, match="not started"):
        assert standin.url


def test_a_chunked_body_is_read_whole() -> None:
    with N8nStandIn() as n8n:
        connection = http.client.HTTPConnection("127.0.0.1", int(n8n.url.rpartition(":")[2]), timeout=60)
        pieces = iter([b'{"a"', b":", b"1}"])
        connection.request("POST", "/webhook/orders", pieces, {"content-type": "application/json"}, encode_chunked=True)
        assert connection.getresponse().status == 200
        connection.close()
        assert n8n.executions[0].body == {"a": 1}


def test_times_must_make_sense() -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        N8nStandIn().fail(times=0)
