"""What was signed once and comes under another key: marked, or taken for the first; on both engines."""

from __future__ import annotations

import asyncio

from oncehook.model import Item, Mark, Outcome, digest, fair_hash
from oncehook.store.base import Store
from tests.store.conftest import Ground
from tests.store.making import CRM, DAY, MAIL, event_of, intake, item, keep, outcomes, record

ACCEPTED, DUPLICATE, CONFLICT = Outcome.accepted, Outcome.duplicate, Outcome.conflict


def proven(
    key: str | None, signed: str = "captured", *, bound: bool = False, body: bytes = b"{}", **said: object
) -> Item:
    made = item(key, body=body, **said)  # type: ignore[arg-type]
    made.proof, made.is_bound = digest(signed.encode()), bound
    return made


async def test_what_comes_under_another_key_is_kept_worked_and_marked(store: Store) -> None:
    first, again = proven("a", to=[CRM]), proven("b", to=[CRM])
    [one] = await keep(store, first)
    [two] = await keep(store, again)
    assert (one.outcome, two.outcome) == (ACCEPTED, ACCEPTED)
    event = await event_of(store, two)
    assert (event.same_as, event.marks) == (first.event_id, Mark.same_body)
    assert (again.same_as, again.marks) == (first.event_id, Mark.same_body), "who counts it is told"
    before = await event_of(store, one)
    assert (before.same_as, before.marks) == (None, Mark.none)


async def test_copies_and_others_are_not_marked(store: Store) -> None:
    assert outcomes(await keep(store, proven("a"))) == [ACCEPTED]
    copy, other, unproven = proven("a"), proven("c", "something else"), item("d", body=b"{}")
    assert outcomes(await keep(store, copy)) == [DUPLICATE]
    assert outcomes(await keep(store, other)) == [ACCEPTED]
    assert outcomes(await keep(store, unproven)) == [ACCEPTED]
    assert all(one.same_as is None for one in (copy, other, unproven))


async def test_a_copy_of_a_marked_event_is_its_copy(store: Store) -> None:
    await keep(store, proven("a"))
    [marked] = await keep(store, proven("b"))
    again = proven("b")
    [verdict] = await keep(store, again)
    assert (verdict.outcome, verdict.event_id) == (DUPLICATE, marked.event_id)
    assert again.same_as is None, "it is counted once"


async def test_what_has_no_key_is_marked_each_time(store: Store) -> None:
    """Acuity: two reschedules have the same bytes, and both are meant."""
    [first] = await keep(store, proven(None))
    for _ in range(2):
        [verdict] = await keep(store, proven(None, bound=True))
        assert verdict.outcome is ACCEPTED
        assert (await event_of(store, verdict)).same_as == first.event_id


async def test_bound_it_is_a_copy_of_the_first_or_its_conflict(store: Store) -> None:
    [first] = await keep(store, proven("a", bound=True, to=[CRM]))
    for key in ("b", None, "a"):
        [verdict] = await keep(store, proven(key, bound=True, to=[CRM]))
        assert (verdict.outcome, verdict.event_id) == (DUPLICATE, first.event_id)
    [forged] = await keep(store, proven("c", bound=True, body=b"forged", to=[CRM]))
    assert (forged.outcome, forged.event_id) == (CONFLICT, first.event_id)
    assert (await event_of(store, first)).copies == 5
    assert [one.outcome for one in await store.arrivals_of(first.event_id)].count(CONFLICT) == 1
    # and nobody's key is burnt by it
    assert outcomes(await keep(store, item("b", body=b"genuine"))) == [ACCEPTED]


async def test_a_proof_that_came_with_a_copy_counts_too(store: Store) -> None:
    """A retry may be signed anew: what was captured of it proves no other event."""
    [first] = await keep(store, proven("a", "one", bound=True))
    assert outcomes(await keep(store, proven("a", "two", bound=True))) == [DUPLICATE]
    [verdict] = await keep(store, proven("b", "two", bound=True, body=b"forged"))
    assert (verdict.outcome, verdict.event_id) == (CONFLICT, first.event_id)


async def test_in_one_group_it_is_the_same(store: Store) -> None:
    marked, copied = proven("b"), proven("y", "other", bound=True)
    verdicts = await record(
        store, intake(proven("a")), intake(marked), intake(proven("x", "other", bound=True)), intake(copied)
    )
    assert outcomes(verdicts) == [ACCEPTED, ACCEPTED, ACCEPTED, DUPLICATE]
    assert marked.same_as == verdicts[0].event_id
    assert verdicts[3].event_id == verdicts[2].event_id


async def test_of_many_at_once_all_but_one_are_marked(store: Store) -> None:
    items = [proven(f"k{n}", subject=f"s{n}", to=[CRM]) for n in range(40)]
    await asyncio.gather(*(keep(store, one) for one in items))
    assert sum(one.same_as is None for one in items) == 1


async def test_a_proof_is_forgotten_with_its_key(store: Store, ground: Ground) -> None:
    await keep(store, proven("a", keep=DAY))
    ground.forward(DAY + 1)
    late = proven("b", keep=DAY)
    await keep(store, late)
    assert late.same_as is None
    ground.forward(DAY + 1)
    for _ in range(3):
        await store.prune({}, 365 * DAY, limit=100)
    assert ground.sql("SELECT count(*) FROM proofs") == [(0,)]


async def test_account_and_value_stay_with_their_event_in_any_group(store: Store, ground: Ground) -> None:
    """Whatever else is in the group: copies of what is known, copies of each other, and events with a proof."""
    await record(store, intake(item("1", account="a", to=[CRM], fair="v0")))
    group = [
        item("1", account="a", to=[CRM], fair="copy"),
        item("1", account="b", to=[CRM], fair="v1"),
        item("2", to=[CRM]),
        item("1", account="b", to=[MAIL], fair="copy"),
        proven("3", account="c", to=[CRM, MAIL], fair="v3"),
        item(account="d", to=[MAIL], fair="v4"),
    ]
    verdicts = await record(store, *map(intake, group))
    assert outcomes(verdicts) == [DUPLICATE, ACCEPTED, ACCEPTED, DUPLICATE, ACCEPTED, ACCEPTED]
    rows = ground.sql(
        "SELECT e.account, d.destination_id, d.fair, h.fair FROM events e JOIN deliveries d ON d.event_id = e.id"
        " JOIN heads h ON h.delivery_id = d.id ORDER BY d.seq"
    )
    expected = [("a", CRM, "v0"), ("b", CRM, "v1"), (None, CRM, None), ("c", CRM, "v3"), ("c", MAIL, "v3"),
                ("d", MAIL, "v4")]  # fmt: skip
    hashes = [None if value is None else fair_hash(value) for _, _, value in expected]
    assert rows == [(account, to[1], of, of) for (account, to, _), of in zip(expected, hashes, strict=True)]
