"""What the tests of the configuration share: texts, a canary, and the shortest way from a text to its settings."""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from oncehook.errors import ConfigError
from oncehook.settings import Loaded, load

CANARY = "canary-9f1b2c"
BEARER = 'verify = "bearer"'


def write(folder: Path, text: str, name: str = "oncehook.toml") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text), "utf-8")
    return path


def loads(
    text: str,
    env: Mapping[str, str] | None = None,
    *,
    folder: Path | None = None,
    flags: Mapping[str, object] | None = None,
    secrets: bool = True,
) -> Loaded:
    """Load a text; the environment is only what the test gives."""
    with tempfile.TemporaryDirectory() as empty:
        cwd = folder or Path(empty)
        write(cwd, text)
        return load(None, env or {}, cwd, flags=flags, secrets=secrets)


def refused(
    text: str,
    env: Mapping[str, str] | None = None,
    *,
    folder: Path | None = None,
    flags: Mapping[str, object] | None = None,
) -> list[str]:
    """The lines with which a text is refused."""
    with pytest.raises(ConfigError) as caught:
        loads(text, env, folder=folder, flags=flags)
    return str(caught.value).splitlines()


def source(settings: str = "", verify: str = 'verify = "none"') -> str:
    return f"[source.orders]\n{verify}\n{settings}\n"


def destination(settings: str) -> str:
    return f'[destination.n8n]\nurl = "https://n8n.example/x"\n{settings}\n'


EXAMPLE = """\
store = "sqlite:./oncehook.db"

[server]
host = "127.0.0.1"
port = 4020
admin_token = { env = "ONCEHOOK_TOKEN" }

[source.orders]
verify = "none"
key = ["header:X-Request-Id", "$.idempotency_key", "$.data.idempotency_key", "$.messageId"]
on_missing_key = "body_hash"
subject = "$.order.id"
keep_keys = "30d"
keep_events = "30d"

[source.partner]
verify = { scheme = "hmac", header = "X-Signature", prefix = "sha256=", algorithm = "sha256", encoding = "hex" }
secret = [{ env = "PARTNER_SECRET" }, { env = "PARTNER_SECRET_OLD" }]
key = ["$.id"]
tolerance = "off"
max_body = "4MiB"
ip_allow = ["192.0.2.0/24"]

[destination.n8n]
url = "https://n8n.example/webhook/abc"
sign = { env = "N8N_SECRET" }
timeout = "15s"
retry = { attempts = 8, base = "10s", factor = 2, cap = "6h", jitter = "full" }
rate = "50/s"
concurrency = 16
breaker = { failures = 5, open = "30s" }
lease = "10s"
allow_private = false

[[route]]
from = "orders"
to = "n8n"
when = { type = "message.*" }
coalesce = false
on_dead = "continue"

[watermark]
dead = 100
oldest_due = "5m"
daily_volume = { orders = 50 }
disk = "10%"
"""
EXAMPLE_ENV = dict.fromkeys(("ONCEHOOK_TOKEN", "PARTNER_SECRET", "PARTNER_SECRET_OLD", "N8N_SECRET"), CANARY)
