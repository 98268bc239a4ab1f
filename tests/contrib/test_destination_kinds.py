"""Kinds of destinations: ours, and one that a package of its own brings (examples/file-destination)."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from oncehook.destinations import registry
from oncehook.errors import ConfigError
from oncehook.inbox import Inbox
from oncehook.model import DeliveryStatus
from oncehook.settings import load
from oncehook.settings.describe import schema
from oncehook.settings.tables import DestinationArguments, DestinationSettings

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/file-destination"

SETTINGS = """
store = "sqlite:{folder}/x.db"
[source.orders]
verify = "none"
[destination.audit]
retry = ["0.01s"]
[destination.audit.file]
path = "{folder}/{file}"
[[route]]
from = "orders"
to = "audit"
"""


FILE = '[destination.audit.file]\npath = "{folder}/{file}"\n'


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the example as pip would: its module on the path, and its entry point in the metadata."""
    site = tmp_path / "site"
    metadata = site / "oncehook_file-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: oncehook-file\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[oncehook.destinations]\nfile = oncehook_file:KIND\n")
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()


def write(folder: Path, text: str = SETTINGS, file: str = "events.jsonl") -> Path:
    path = folder / "oncehook.toml"
    path.write_text(text.format(folder=folder, file=file))
    return path


@pytest.mark.usefixtures("installed")
async def test_a_kind_of_another_package_gets_its_events(tmp_path: Path) -> None:
    inbox = Inbox.from_config(load(write(tmp_path)).config)
    audit = inbox.destinations["audit"]
    assert (audit.kind, audit.address) == ("file", f"{tmp_path}/events.jsonl")
    async with inbox.running():
        for number in range(2):
            await inbox.receive(
                "orders", {"Idempotency-Key": f"k{number}"}, b'{"type": "order.paid"}', peer="127.0.0.1"
            )
        await inbox.drain()
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert sorted((line["source"], line["key"], line["type"]) for line in lines) == [
        ("orders", "k0", "order.paid"), ("orders", "k1", "order.paid"),
    ]  # fmt: skip


@pytest.mark.usefixtures("installed")
async def test_its_failures_are_dead_letters(tmp_path: Path) -> None:
    inbox = Inbox.from_config(load(write(tmp_path, file="nowhere/events.jsonl")).config)
    async with inbox.running():
        await inbox.receive("orders", {"Idempotency-Key": "k"}, b"{}", peer="127.0.0.1")
        await inbox.drain()
        [delivery] = (await inbox.admin.deliveries(inbox.admin.read(""))).items
        assert delivery.status is DeliveryStatus.dead
        assert "nowhere" in (delivery.last_error or "")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("path =", "pth ="), 'unknown key "pth" in [destination.audit.file]; did you mean "path"?'),
        (('path = "{folder}/{file}"', "path = 5"), "path in [destination.audit.file]"),
        (('path = "{folder}/{file}"', ""), '[destination.audit.file] needs "path"'),
        (("[destination.audit.file]", "[destination.audit.fiel]"), 'unknown key "fiel" in [destination.audit]'),
        (('retry = ["0.01s"]', 'url = "https://a.example/"'), "has both url and file; keep one of them"),
        (('retry = ["0.01s"]', 'headers = {{ a = "b" }}'), "headers in [destination.audit] is for a url, not for file"),
        (('retry = ["0.01s"]', 'kind = "flie"'), 'there is no kind of destination "flie"; did you mean "file"?'),
    ],
)
def test_its_settings_are_checked_like_ours(tmp_path: Path, change: tuple[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(write(tmp_path, SETTINGS.replace(*change)))
    assert sentence in str(raised.value)


@pytest.mark.usefixtures("installed")
def test_it_is_listed_and_described_to_editors() -> None:
    assert registry.names() == ["celery", "file", "whatsapp"]
    described = schema()["$defs"]
    assert described["DestinationSettings"]["properties"]["file"] == {"$ref": "#/$defs/FileSettings"}
    assert described["FileSettings"]["properties"]["path"]["description"] == "The file."


def test_a_type_checker_knows_the_tables_of_our_own_kinds() -> None:
    own = set(DestinationArguments.__annotations__) - set(DestinationSettings.__annotations__)
    assert {name for name in own if not name.endswith("_env")} == set(registry.OURS)


def test_what_is_not_installed_is_an_unknown_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'unknown key "file" in \[destination.audit\]'):
        load(write(tmp_path))


def test_a_kind_without_settings_is_named_by_its_word(tmp_path: Path) -> None:
    text = SETTINGS.replace(FILE, 'kind = "celery"\n')
    with pytest.raises(ConfigError, match=r'\[destination.audit.celery\] needs "task"'):
        load(write(tmp_path, text))


def test_a_task_is_named_in_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proj.py").write_text("app = object()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = SETTINGS.replace(FILE, '[destination.audit.celery]\ntask = "bill"\napp = "{file}"\n')
    made = Inbox.from_config(load(write(tmp_path, text, "proj:app")).config).destinations["audit"]
    assert (made.kind, made.address, made.name) == ("celery", "bill", "audit")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Inbox.from_config(load(write(tmp_path, text, "proj:nothing")).config)


def test_no_kind_is_imported_that_nobody_names(tmp_path: Path) -> None:
    text = SETTINGS.replace(FILE, 'url = "https://a.example/"\n')
    code = (
        "import sys; from pathlib import Path; from oncehook.inbox import Inbox; from oncehook.settings import load; "
        f"Inbox.from_config(load(Path({str(write(tmp_path, text))!r})).config); "
        "print([name for name in sys.modules if name.startswith(('oncehook.whatsapp', 'oncehook.contrib'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
