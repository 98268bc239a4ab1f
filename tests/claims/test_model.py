"""Any order of verbs does what a dictionary would do: one model, every backend."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from oncehook.claims import Claims
from oncehook.errors import ClaimLost
from tests.effort import effort

KEYS = st.sampled_from(["a", "b"])
RESULTS = st.none() | st.binary(max_size=8)


class Model(RuleBasedStateMachine):
    """Beside the claims: who has each key, and what was committed. Nothing lapses here."""

    store = ""

    def __init__(self) -> None:
        super().__init__()
        self.claims = Claims(self.store, namespace=f"m{secrets.token_hex(6)}", ttl="1h")
        self.held: dict[str, str] = {}
        self.done: dict[str, tuple[str, bytes | None]] = {}
        self.tokens: list[str] = ["0" * 32]

    def teardown(self) -> None:
        self.claims.close()

    @rule(key=KEYS)
    def claim(self, key: str) -> None:
        answer = self.claims.claim(key)
        if key in self.done:
            assert (answer.status, answer.result) == ("done", self.done[key][1])
        elif key in self.held:
            assert (answer.status, answer.token) == ("in_progress", None)
        else:
            assert answer.status == "new"
            assert answer.token
            assert answer.token not in self.tokens
            self.held[key] = answer.token
            self.tokens.append(answer.token)

    def try_with(self, data: Any, key: str, expected: bool, verb: str, token: str, *more: Any) -> None:
        if expected:
            getattr(self.claims, verb)(key, token, *more)
        else:
            with pytest.raises(ClaimLost):
                getattr(self.claims, verb)(key, token, *more)

    @rule(data=st.data(), key=KEYS)
    def renew(self, data: Any, key: str) -> None:
        token = data.draw(st.sampled_from(self.tokens))
        self.try_with(data, key, self.held.get(key) == token, "renew", token)

    @rule(data=st.data(), key=KEYS)
    def abort(self, data: Any, key: str) -> None:
        token = data.draw(st.sampled_from(self.tokens))
        ours = self.held.get(key) == token
        self.try_with(data, key, ours, "abort", token)
        if ours:
            del self.held[key]

    @rule(data=st.data(), key=KEYS, result=RESULTS)
    def commit(self, data: Any, key: str, result: bytes | None) -> None:
        token = data.draw(st.sampled_from(self.tokens))
        ours = self.held.get(key) == token
        again = key in self.done and self.done[key][0] == token
        self.try_with(data, key, ours or again, "commit", token, result)
        if ours:
            self.done[key] = self.held.pop(key), result

    @precondition(lambda self: self.held or self.done)
    @rule(key=KEYS)
    def forget(self, key: str) -> None:
        assert self.claims.forget(key) is (key in self.held or key in self.done)
        self.held.pop(key, None)
        self.done.pop(key, None)

    @invariant()
    def stands(self) -> None:
        for key in ("a", "b"):
            seen = self.claims.look(key)
            expected = "done" if key in self.done else "in_progress" if key in self.held else None
            assert (seen.status if seen else None) == expected


def test_any_order_of_verbs(store: str) -> None:
    machine = type("OnThisStore", (Model,), {"store": store})
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    bounds = settings(
        max_examples=effort("RULE_EXAMPLES", 8), stateful_step_count=25, deadline=None, suppress_health_check=checks
    )
    run_state_machine_as_test(machine, settings=bounds)
