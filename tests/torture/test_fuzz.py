"""Whatever bytes come in, nothing raises anything but its own errors (S2, S11, S12, S35, S36; R16).

TORTURE_EXAMPLES says how many bytes are tried per target; `scripts/fuzz --only readers` tries for as long as it is
told to, without Hypothesis.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.effort import effort
from tests.torture.fuzz_targets import SEP, TARGETS, seeds

EXAMPLES = effort("EXAMPLES", 150)
every_target = pytest.mark.parametrize("name", TARGETS)

TOKENS = (
    *(
        b"\x1f",
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b":",
        b",",
        b"\\u",
        b"\\",
        b"$",
        b"..",
        b".a",
        b"*",
        b"?",
        b"=",
        b"&",
        b"%",
    ),
    *(
        b"\0",
        b"\xff",
        b"\xed\xa0\x80",
        b"\r\n",
        b"1e999",
        b"-",
        b"nan",
        b"sha256=",
        b"t=",
        b"v1=",
        b"id",
        b"null",
        b"0" * 64,
    ),
)


@st.composite
def bytes_for(draw: st.DrawFn, name: str) -> bytes:
    """Anything at all, or a seed with some of it replaced."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=400))
    data = draw(st.sampled_from(sorted(set(seeds(name)))))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = start + draw(st.integers(0, 8))
        data = data[:start] + draw(st.sampled_from(TOKENS) | st.binary(max_size=6)) + data[end:]
    return data


@every_target
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_bytes(name: str, data: st.DataObject) -> None:
    TARGETS[name](data.draw(bytes_for(name)))


@every_target
def test_seeds(name: str) -> None:
    made = list(seeds(name))
    assert len(made) > 3
    for seed in made:
        TARGETS[name](seed)


LARGE = 1 << 20
"""Bytes: as much as a body may have. Whoever takes the square of its time for them runs into the suite's own limit."""


@every_target
@pytest.mark.parametrize(
    "unit", [b"[", b'{"a":', b"a=b&", b"\x1f", b'"\\', b"%ff", b"$..a", b"1", b"v1,", b" ", b"\xff", b"::1,"]
)
def test_much_of_the_same(name: str, unit: bytes) -> None:
    data = unit * (LARGE // len(unit))
    TARGETS[name](data)
    TARGETS[name](b"\x01\x01" + data[: LARGE // 2] + SEP + data)
