"""S37: erasing a subject through the API, and by command: who may, what is said before, what is left."""

from __future__ import annotations

import pytest

from oncehook.model import subject_hash
from tests.acceptance.admin_house import House
from tests.acceptance.test_api import dlv, either, evt, house
from tests.store.making import deliver, finish, take_one

__all__ = ["either", "house"]

REASON = {"reason": "request 118"}


async def test_a_dry_run_counts_and_does_nothing(either: House) -> None:
    await deliver(either.store, "cus_42", "cus_42", "cus_43")
    asked = {"subject": "cus_42", "dry_run": True}
    counted = await either.post("/erase", asked, role="admin")
    assert counted == {
        "subject_hash": subject_hash("cus_42"), "dry_run": True, "events": 2, "deliveries": 2, "attempts": 0,
        "arrivals": 0, "batches": 0, "shared_batches": 0, "remaining": 2,
    }  # fmt: skip
    assert await either.post("/erase", asked, role="admin") == counted
    assert (await either.get("/audit", role="admin"))["items"] == []


async def test_it_is_erased_and_the_audit_log_says_so_without_the_subject(either: House) -> None:
    [made, _] = await deliver(either.store, "cus_42", "cus_42")
    await finish(either.store)
    erased = await either.post("/erase", {"subject": "cus_42", **REASON}, role="admin")
    assert (erased["events"], erased["deliveries"], erased["remaining"]) == (2, 0, 0)
    [line] = (await either.get("/audit", role="admin"))["items"]
    assert (line["actor"], line["act"], line["target"]) == ("admin", "erase", f"subject {subject_hash('cus_42')}")
    assert "cus_42" not in str(line)
    shown = await either.get(f"/events/{evt(made)}", role="viewer")
    assert (shown["marks"], shown["subject"], shown["size"], shown["headers"]) == (["erased"], None, 0, [])
    assert shown["deliveries"][0]["note"] == "erased"
    assert await either.refused("POST", f"/deliveries/{dlv(made)}/replay", {"force": True}) == (409, "erased")
    plan = await either.post("/replays/plan", {"ids": [dlv(made)], "force": True})
    assert (plan["total"], plan["left_out"]) == (0, {"done": 1})
    found = await either.get("/deliveries?query=note:erased")
    assert len(found["items"]) == 2


async def test_one_request_erases_so_many_and_the_next_goes_on(house: House) -> None:
    await deliver(house.store, *["cus_42"] * 7)
    house.admin.erased_at_most = 3
    order = {"subject": "cus_42", **REASON}
    told = [await house.post("/erase", order, role="admin") for _ in range(4)]
    assert [(one["events"], one["remaining"]) for one in told] == [(3, 4), (3, 1), (1, 0), (0, 0)]


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ({"subject": "cus_42"}, (400, "bad_request")),
        ({"subject": "cus_42", "reason": "  "}, (400, "bad_request")),
        ({"subject": "cus_42", "reason": "asked by cus_42"}, (400, "bad_request")),
        ({"subject": "", **REASON}, (400, "bad_request")),
        ({"subject": "cus_42", "source": "nobody", **REASON}, (404, "not_found")),
        ({"subject": "cus_42\0", **REASON}, (400, "bad_request")),
    ],
)
async def test_what_cannot_be_meant_is_refused(house: House, body: dict[str, str], answer: tuple[int, str]) -> None:
    await deliver(house.store, "cus_42")
    assert await house.refused("POST", "/erase", body, role="admin") == answer
    assert (await take_one(house.store)).event.subject == "cus_42"


async def test_a_reason_may_hold_the_digits_of_a_short_subject(house: House) -> None:
    await deliver(house.store, "1")
    assert (await house.post("/erase", {"subject": "1", **REASON}, role="admin"))["events"] == 1


async def test_only_an_admin_may(house: House) -> None:
    for role in ("viewer", "operator"):
        assert await house.refused("POST", "/erase", {"subject": "x", "dry_run": True}, role=role) == (403, "forbidden")
