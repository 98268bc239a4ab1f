"""One way of writing a recipient, whatever came in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncehook.whatsapp.messages import InvalidMessage
from oncehook.whatsapp.numbers import id_of, is_group_id, is_user_id, normalise

GROUP = "Y2FwaV9ncm91cDoxNzA1NTU1MDEzOToxMjAzNjM0MDQ2OTQyMzM4MjAZD"


@pytest.mark.parametrize(
    ("written", "country", "expected"),
    [
        ("+55 (11) 99999-0001", None, "5511999990001"),
        ("+55\u00a011\u00a099999\u20110001", None, "5511999990001"),
        ("\u202a+55 11 99999-0001\u202c", None, "5511999990001"),
        (" +1.202.555.0123 ", None, "12025550123"),
        ("0055 11 99999 0001", None, "5511999990001"),
        ("5511999990001", None, "5511999990001"),
        ("5511999990001@s.whatsapp.net", None, "5511999990001"),
        ("5511999990001:12@s.whatsapp.net", None, "5511999990001"),
        ("5511999990001.0:3@s.whatsapp.net", None, "5511999990001"),
        ("5511999990001@c.us", None, "5511999990001"),
        ("120363041234567890@g.us", None, "120363041234567890@g.us"),
        ("5511999990001-1600000000@g.us", None, "5511999990001-1600000000@g.us"),
        ("123456789012345@lid", None, "123456789012345@lid"),
        ("5511999990001-1400000000@broadcast", None, "5511999990001-1400000000@broadcast"),
        ("US.13491208655302741918", None, "US.13491208655302741918"),  # Meta's ids of people and groups
        (" IN.ENT.9081726354 ", "55", "IN.ENT.9081726354"),
        (f"BR.{'a1' * 64}", None, f"BR.{'a1' * 64}"),
        (GROUP, "55", GROUP),
        ("(11) 99999-0001", "55", "5511999990001"),
        ("(11) 3333-4444", "+55", "551133334444"),
        ("011 99999-0001", "55", "5511999990001"),
        ("5511999990001", "55", "5511999990001"),
        ("55 99999-0001", "55", "5555999990001"),  # the area 55 in the country 55
        ("5555999990001", "55", "5555999990001"),
        ("+351 912 345 678", "55", "351912345678"),
        ("12025550123", "55", "12025550123"),  # no area 12 has such a number
        ("202 555 0123", "1", "12025550123"),
        ("1 202 555 0123", "1", "12025550123"),
        ("0171 1234567", "49", "491711234567"),
        ("06 1234 5678", "39", "390612345678"),  # Italy dials its 0 from abroad too
        ("912 345 678", "351", "351912345678"),
        ("351912345678", "351", "351912345678"),
    ],
)
def test_a_recipient_has_one_spelling(written: str, country: str | None, expected: str) -> None:
    assert normalise(written, country=country) == expected
    assert (
        normalise(expected, country=country if expected.startswith((country or "").lstrip("+")) else None) == expected
    )


@pytest.mark.parametrize(
    ("written", "country", "why"),
    [
        ("", None, "holds no number"),
        ("  ", "55", "holds no number"),
        ("call me", None, "holds more than digits"),
        ("us.13491208655302741918", None, "holds more than digits"),
        ("US.1349120865.5302741918", None, "holds more than digits"),
        (f"BR.{'a1' * 64}a", None, "holds more than digits"),
        ("Y2FwaV9ncm91cDo", None, "holds more than digits"),
        ("+55 11 99999-OOO1", None, "holds more than digits"),
        ("٥٥١١٩٩٩٩٩٠٠٠١", None, "holds more than digits"),
        ("+55 11 99999-0001 ext 2", "55", "holds more than digits"),
        ("1234567", None, "is too short: 7 digits, and 8 is the least"),
        ("+1234567890123456", None, "is too long: 16 digits, and 15 is the most"),
        ("011 99999-0001", None, "write it with + or set country"),
        ("+0511999990001", None, "has a 0 where its calling code should be"),
        ("000551199999", None, "has a 0 where its calling code should be"),
        ("99999-0001", "55", "the area code may be missing"),
        ("ana@example.org", None, "ends in @example.org, which is not WhatsApp's"),
        ("@g.us", None, "is no WhatsApp id"),
        ("a b@g.us", None, "is no WhatsApp id"),
        ("11999990001", "BR", "is no calling code"),
        ("11999990001", "", "is no calling code"),
    ],
)
def test_what_is_no_number_says_why(written: str, country: str | None, why: str) -> None:
    with pytest.raises(InvalidMessage) as raised:
        normalise(written, country=country)
    assert why in str(raised.value)


@given(st.integers(10**7, 10**15 - 1).map(str))
def test_what_is_normal_stays_as_it_is(digits: str) -> None:
    assert normalise(digits) == normalise(f"+{digits}") == normalise(f"00{digits}") == digits
    assert normalise(id_of(digits)) == digits


@given(st.text(max_size=40), st.sampled_from([None, "55", "1", "351"]))
def test_anything_else_is_refused_in_words_or_becomes_digits(text: str, country: str | None) -> None:
    try:
        found = normalise(text, country=country)
    except InvalidMessage:
        return
    assert (
        "@" in found
        or is_user_id(found)
        or is_group_id(found)
        or (found.isascii() and found.isdigit() and 8 <= len(found) <= 15)
    )


def test_a_chat_has_an_id() -> None:
    assert id_of("5511999990001") == "5511999990001@s.whatsapp.net"
    assert id_of("120363@g.us") == "120363@g.us"
