"""There is one way out (S21): no module but the guarded client imports anything that speaks HTTP to others."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import oncehook

PACKAGE = Path(oncehook.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
CLIENTS = (
    "aiohappyeyeballs",
    "aiohttp",
    "aiohttp_socks",
    "python_socks",
    "httpx",
    "requests",
    "urllib3",
    "urllib.request",
    "http.client",
    "pycurl",
    "websockets",
    "smtplib",
    "obstore",
)

ALLOWED = {
    "objects.py": {"obstore"},  # buckets, whose endpoint an operator names and `objects` checks
    "http_client/client.py": {"aiohappyeyeballs"},  # the guarded client itself
    "cli/transport.py": {"http.client"},  # the commands' own server, which a person at a terminal names
    "samples.py": {"http.client"},  # `oncehook send` and the demo: a person at a terminal names the address
}


def clients(code: str) -> Iterator[str]:
    """What a module imports, at its top or anywhere inside, that speaks HTTP; `from urllib import request` included."""
    for node in ast.walk(ast.parse(code)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
            names = [str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)]
        for name in names:
            yield from (client for client in CLIENTS if name == client or name.startswith(f"{client}."))


def test_nobody_goes_round_the_guarded_client() -> None:
    used = {str(path.relative_to(PACKAGE)): set(clients(path.read_text())) for path in MODULES}
    assert {name: found for name, found in used.items() if not found <= ALLOWED.get(name, set())} == {}


@pytest.mark.parametrize("name", ALLOWED)
def test_an_exception_is_needed(name: str) -> None:
    assert set(clients((PACKAGE / name).read_text())) == ALLOWED[name]


@pytest.mark.parametrize(
    "code",
    [
        "import aiohttp",
        "import aiohttp.web as w",
        "from urllib import request",
        "from urllib.request import urlopen",
        "import http.client",
        "from http import client",
        "def f():\n    import httpx",
        "importlib.import_module('requests')",
    ],
)
def test_the_check_sees_it(code: str) -> None:
    assert list(clients(code))


def test_the_check_lets_parsing_pass() -> None:
    assert not list(clients("from urllib.parse import quote\nfrom http import HTTPStatus\nimport starlette.requests"))


def test_the_client_is_loaded_when_a_destination_is_opened() -> None:
    code = (
        "import asyncio, sys, oncehook, oncehook.destinations.http as http\n"
        "names = ('oncehook.http_client.client', 'aiohttp')\n"
        "def loaded(): print([name for name in names if name in sys.modules])\n"
        "made = http.HttpDestination('sink', 'https://example.org/', sign=[b'whsec_aGVsbG8='])\n"
        "loaded()\n"
        "asyncio.run(made.open())\n"
        "loaded()\n"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert [ast.literal_eval(line) for line in found.stdout.splitlines()] == [
        [],
        ["oncehook.http_client.client"],
    ]
