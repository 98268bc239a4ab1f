"""A running `oncehook serve`: how the benchmarks start it, and what anybody may ask it.

It has the inbox of `bench.work_peers.oncehook_inbox` on a fresh store, and comes from this tree or from another. Only
what is public is read here (`/metrics` and the JSON API), because another revision may have other tables.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from bench.engines import ROOT, BenchError, Server, free_port
from bench.work_contestants import Place, fresh_store

TOKEN = secrets.token_hex(32)
CONFIG = '[server]\nadmin_token = { env = "BENCH_TOKEN" }\n'
PAGE = 200
FRESH_SECONDS = 1.05
"""Time between two looks at `/metrics`: within a second the same text is answered again."""


class Product(Server):
    """A `serve` that receives and works."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, port: int) -> None:
        super().__init__(command, environment, log, port)
        self.store = environment["BENCH_STORE"]

    def read_settled(self, newest: int) -> dict[str, float]:
        """Return when each of the newest deliveries was settled, in seconds since 1970, by the key of its event.

        Leaves out what is not done yet.
        """
        found: dict[str, float] = {}
        cursor = ""
        while newest > 0:
            limit = min(PAGE, newest)
            page = json.loads(read(self.port, f"/api/v1/deliveries?limit={limit}{cursor}"))
            for one in page["items"]:
                if one["status"] == "done":
                    found[one["key"]] = datetime.fromisoformat(one["settled_at"]).timestamp()
            if page["next"] is None:
                break
            newest -= len(page["items"])
            cursor = f"&cursor={page['next']}"
        return found


@contextmanager
def serving(place: Place, engine: str, scenario: str = "idle", tree: Path = ROOT) -> Iterator[Product]:
    """Start `serve` of a tree on a fresh store; both are gone afterwards."""
    folder = place.folder / "store"
    folder.mkdir()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        environment = {
            "BENCH_STORE": fresh_store(engine, place, folder, stack),
            "BENCH_ENGINE": engine,
            "BENCH_SCENARIO": scenario,
            "BENCH_SINK": place.sink,
            "BENCH_TREE": str(tree),
            "BENCH_TOKEN": TOKEN,
        }
        config, port = folder / "oncehook.toml", free_port()
        config.write_text(CONFIG)
        options = ["--config", str(config), "--port", str(port)]
        command = [sys.executable, "-m", "oncehook", "serve", "bench.work_peers.oncehook_inbox:inbox", *options]
        product = Product(command, environment, folder / "log", port)
        stack.callback(product.stop)
        product.wait_until_ready()
        try:
            yield product
        except (BenchError, OSError) as error:
            raise BenchError(f"{error}\n{product.log_tail()}".rstrip()) from error


def read(port: int, target: str) -> str:
    """Return what a running oncehook answers to a GET."""
    try:
        with closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            connection.request("GET", target, headers={"Authorization": f"Bearer {TOKEN}"})
            answer = connection.getresponse()
            text = answer.read().decode()
    except (OSError, HTTPException) as error:
        raise BenchError(f"no answer to GET {target}: {error}") from error
    if answer.status != 200:
        raise BenchError(f"GET {target} was answered {answer.status}: {text[:200]}")
    return text


def read_counter(port: int, name: str, outcome: str) -> int:
    """Return how often something ended so, by `/metrics`."""
    rows = re.findall(rf'^{name}{{[^}}]*outcome="{outcome}"[^}}]*}} (\S+)$', read(port, "/metrics"), re.MULTILINE)
    return round(sum(map(float, rows)))
