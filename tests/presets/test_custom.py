"""Sources of one's own: functions for settings, and presets that another package brings."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oncehook import presets, settings
from oncehook.errors import ConfigError
from oncehook.inbox import Inbox
from oncehook.model import Arrival, Mark
from oncehook.rules import header
from oncehook.settings import development
from oncehook.sources import Odd
from oncehook.testing import send
from oncehook.verify import Custom, Hmac, same
from tests.kept import kept_events

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "custom-source.md"


# -- functions ---------------------------------------------------------------------------------


def genuine(arrival: Arrival, secret: bytes) -> bool:
    return same((header(arrival.headers, b"x-pass") or "").encode(), secret)


def own_inbox(folder: Path, **settings: Any) -> Inbox:
    inbox = Inbox(f"sqlite:{folder}/x.db")
    inbox.source("own", **{"verify": genuine, "secret": "pass", "key": "$.id", "budget": "90s", **settings})
    return inbox


async def test_a_check_of_ones_own(tmp_path: Path) -> None:
    inbox = own_inbox(tmp_path, secret=["new pass", "old pass"])
    async with inbox.running():
        for number, secret in enumerate(("new pass", "old pass")):
            receipt = await inbox.receive("own", {"X-Pass": secret}, b'{"id":%d}' % number)
            assert receipt.outcome == "accepted"
        for headers in ({}, {"X-Pass": ""}, {"X-Pass": "pass"}, {"X-Pass": "new pass "[:-2]}):
            refused = await inbox.receive("own", headers, b'{"id":9}')
            assert (refused.outcome, refused.reply.status) == ("rejected", 401)
        assert len(await kept_events(inbox.store)) == 2


@pytest.mark.parametrize("answer", [None, 1, "yes", [1], object(), False, 0])
async def test_nothing_but_true_lets_it_in(tmp_path: Path, answer: Any) -> None:
    inbox = own_inbox(tmp_path, verify=lambda arrival, secret: answer)
    async with inbox.running():
        assert (await inbox.receive("own", {}, b"{}")).reply.status == 401


@pytest.mark.parametrize("error", [KeyError("x"), AttributeError("x"), ValueError("x"), TypeError("x")])
async def test_what_cannot_be_read_is_refused(tmp_path: Path, error: Exception) -> None:
    def stumbles(arrival: Arrival, secret: bytes) -> bool:
        raise error

    inbox = own_inbox(tmp_path, verify=stumbles)
    async with inbox.running():
        assert (await inbox.receive("own", {}, b"{}")).reply.status == 401


async def test_a_fault_of_ours_makes_the_sender_try_again(tmp_path: Path) -> None:
    def broken(arrival: Arrival, secret: bytes) -> bool:
        raise RuntimeError("the key server is away")

    inbox = own_inbox(tmp_path, verify=broken)
    async with inbox.running():
        receipt = await inbox.receive("own", {}, b"{}")
        assert (receipt.outcome, receipt.reply.status) == ("error", 503)
        assert b"key server" not in receipt.reply.body
        assert await kept_events(inbox.store) == []


def test_a_check_without_a_secret_does_not_start(tmp_path: Path) -> None:
    without: tuple[Any, ...] = (None, "", " ", [])
    for secret in without:
        with pytest.raises(ConfigError):
            own_inbox(tmp_path, secret=secret)


def test_a_check_cannot_be_awaited(tmp_path: Path) -> None:
    async def later(arrival: Arrival, secret: bytes) -> bool:
        return True

    with pytest.raises(ConfigError, match="plain function"):
        own_inbox(tmp_path, verify=later)


async def test_an_object_that_can_be_called_is_a_check_too(tmp_path: Path) -> None:
    class Check:
        def __call__(self, arrival: Arrival, secret: bytes) -> bool:
            return genuine(arrival, secret)

    inbox = own_inbox(tmp_path, verify=Check())
    async with inbox.running():
        assert (await inbox.receive("own", {"X-Pass": "pass"}, b'{"id":1}')).outcome == "accepted"
        assert (await inbox.receive("own", {}, b'{"id":1}')).reply.status == 401


async def test_a_scheme_stays_a_scheme(tmp_path: Path) -> None:
    inbox = own_inbox(tmp_path, verify=Hmac(header="X-Sign"))
    async with inbox.running():
        [answer] = await send(inbox, "own")
        assert answer.status == 200


async def test_headers_that_carry_the_secret_are_not_kept(tmp_path: Path) -> None:
    inbox = own_inbox(tmp_path, verify=Custom(genuine, headers=("X-Pass",)), secret="canary-pass")
    async with inbox.running():
        assert (await inbox.receive("own", {"X-Pass": "canary-pass"}, b'{"id":1}')).outcome == "accepted"
        await inbox.store.ping()
        assert b"canary-pass" not in b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())


async def test_a_header_is_a_key_by_default_only_where_the_body_is_not_covered(tmp_path: Path) -> None:
    for covers, second in ((False, "accepted"), (True, "duplicate")):
        folder = tmp_path / str(covers)
        folder.mkdir()
        inbox = own_inbox(folder, verify=Custom(genuine, body=covers), key=None)
        async with inbox.running():
            for number, outcome in enumerate(("accepted", second)):
                headers = {"X-Pass": "pass", "Idempotency-Key": f"k{number}"}
                assert (await inbox.receive("own", headers, b'{"messageId":"m"}')).outcome == outcome


async def test_a_splitter_and_a_key_of_ones_own(tmp_path: Path) -> None:
    def split(data: Any, arrival: Arrival) -> Any:
        for line in data["lines"]:
            part = {**data, "lines": [line]}
            yield part if "n" in line else Odd(part)

    inbox = own_inbox(
        tmp_path,
        split=split,
        key=lambda context: (context.data["shop"], context.data["lines"][0]["n"]),
        subject=lambda context: context.data["shop"],
        type=lambda context: "line",
    )
    async with inbox.running():
        body = {"shop": "lisbon", "lines": [{"n": 1}, {"odd": True}, {"n": 2}]}
        receipt = await inbox.receive("own", {"X-Pass": "pass"}, json.dumps(body).encode())
        assert receipt.outcome == "accepted"
        events = (await kept_events(inbox.store))[::-1]
        assert [(event.key, event.subject, event.type) for event in events] == [
            ("lisbon:1", "lisbon", "line"),
            (None, "lisbon", "line"),
            ("lisbon:2", "lisbon", "line"),
        ]
        assert events[1].marks == Mark.unparsed | Mark.unkeyed
        assert json.loads(events[2].body) == {"shop": "lisbon", "lines": [{"n": 2}]}
        # what the splitter does not understand is kept whole
        for odd in (b'{"lines":5}', b"[]", b"not json"):
            assert (await inbox.receive("own", {"X-Pass": "pass"}, odd)).outcome == "accepted"
        assert [event.body for event in (await kept_events(inbox.store))[:3]] == [b"not json", b"[]", b'{"lines":5}']


async def test_the_page_tells_the_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of the how-to page, run as it stands there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACME_SECRET", "a secret")
    functions, signer, tests, package = re.findall(r"(?s)```python\n(.*?)```", PAGE.read_text())
    names: dict[str, Any] = {}
    exec(functions, names)
    del names["inbox"].sources["acme"]
    exec(signer, names)
    exec(tests, names)
    async with names["inbox"].running():
        await names["test_an_order_counts_once"](names["inbox"])
    exec(package, names)
    assert names["PRESET"].name == "acme"


# -- presets of other packages -----------------------------------------------------------------

MODULE = """
from oncehook.sources import Preset, Sample
from oncehook.verify import Hmac

PRESET = Preset(
    name="acme",
    title="Acme Orders",
    scheme=Hmac(header="X-Acme-Proof", algorithm="sha512", signed="acme:{body}"),
    key=[["$.order.number", "$.order.state"]],
    type="$.order.state",
    subject="$.order.number",
    horizon="2d",
    samples={"paid": Sample('{"order":{"number":{number},"state":"paid"}}')},
)
NOT_ONE = {"name": "acme"}
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a package is installed for this test only."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return folder


def install(site: Path, **points: str) -> None:
    """What an installer leaves behind: the module, and the record of what the distribution brings."""
    (site / "acme_oncehook.py").write_text(MODULE)
    record = site / "acme_oncehook-1.2.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-oncehook\nVersion: 1.2\n")
    (record / "INSTALLER").write_text("pip\n")
    lines = [f"{name.replace('_', '-')} = {value}" for name, value in points.items()]
    (record / "entry_points.txt").write_text("\n".join(["[oncehook.presets]", *lines]) + "\n")
    importlib.invalidate_caches()
    sys.modules.pop("acme_oncehook", None)


async def test_a_preset_of_another_package(site: Path, tmp_path: Path) -> None:
    assert "acme" not in presets.names()
    install(site, acme="acme_oncehook:PRESET")
    assert "acme" in presets.names()
    assert presets.load("acme").title == "Acme Orders"
    with pytest.raises(ConfigError, match='Did you mean "acme"'):
        presets.load("akme")
    inbox = Inbox(f"sqlite:{tmp_path}/x.db")
    inbox.source("orders", preset="acme", secret="s", budget="90s")
    async with inbox.running():
        first, second = await send(inbox, "orders", "paid", repeat=2)
        assert (first.json()["status"], second.json()["status"]) == ("accepted", "duplicate")
        [refused] = await send(inbox, "orders", "paid", forge=True)
        assert refused.status == 401
        [event] = await kept_events(inbox.store)
        assert event.type == "paid"
        assert event.key == f"{event.subject}:paid"


def test_a_preset_of_another_package_in_the_settings(site: Path, tmp_path: Path) -> None:
    install(site, acme="acme_oncehook:PRESET")
    written = tmp_path / "oncehook.toml"
    written.write_text('[source.orders]\npreset = "acme"\nsecret = { env = "ACME" }\n')
    inbox = Inbox.from_config(settings.load(written, env={"ACME": "s"}).config)
    assert inbox.sources["orders"].preset == presets.load("acme")
    written.write_text('[source.orders]\npreset = "acme"\n')
    with pytest.raises(ConfigError, match="needs secret"):
        settings.load(written, env={})
    assert "acme" in {source.name for source in development.sources()}


def test_a_preset_of_another_package_on_the_command_line(site: Path, tmp_path: Path) -> None:
    install(site, acme="acme_oncehook:PRESET")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-m", "oncehook", "send", "--list"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "acme                 paid" in done.stdout.splitlines()


def test_our_names_cannot_be_taken(site: Path) -> None:
    ours = presets.load("stripe")
    install(site, stripe="acme_oncehook:PRESET")
    assert presets.load("stripe") is ours
    assert presets.names().count("stripe") == 1


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("acme_oncehook:NOT_ONE", "is a dict"),
        ("acme_oncehook:MISSING", "cannot be loaded"),
        ("no_such_module:PRESET", "cannot be loaded"),
    ],
)
def test_a_broken_preset_is_told_by_the_name_of_its_package(site: Path, value: str, complaint: str) -> None:
    install(site, acme=value)
    with pytest.raises(ConfigError, match=f'"acme" of acme-oncehook {complaint}'):
        presets.load("acme")
    presets.load("stripe")  # nobody else is hurt
