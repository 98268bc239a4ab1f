"""OpenID providers for tests: a real one, in a process of its own, and one that lies as it is told.

The real one is `oidc-provider-mock` from PyPI (Authlib inside): it checks client, secret, redirect address and code by
itself. The liar signs with real keys and checks PKCE, and a test changes whatever it says.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote_plus, urlsplit

import httpx
from joserfc import jws
from joserfc.jwk import Key, RSAKey

CLIENT, SECRET = "inbox", "s3cret:with+signs"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@functools.cache
def usual_key() -> RSAKey:
    """One for all: making it takes a while."""
    return RSAKey.generate_key(2048, {"kid": "one", "use": "sig"})


class Provider:
    """The real one: it stops with the block, and may be stopped and started in it."""

    def __init__(self, folder: Path, *users: dict[str, Any], registered: bool = True, seconds: int = 3600) -> None:
        self.port = free_port()
        self._log = folder / "provider.log"
        self._arguments = ["--port", str(self.port), "--token-max-age", str(seconds), "--require-nonce", "true"]
        self._arguments += ["--require-registration", "true" if registered else "false"]
        for user in users:
            self._arguments += ["--user-claims", json.dumps(user)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def issuer(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "oidc_provider_mock", *self._arguments]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + 60
        while time.monotonic() < until and self._process.poll() is None:
            try:
                httpx.get(f"{self.issuer}/jwks", timeout=5)
                return
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError(self._log.read_text())

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Provider:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def register(self, redirect: str) -> tuple[str, str]:
        """A client of its own, and its secret."""
        made = httpx.post(f"{self.issuer}/oauth2/clients", json={"redirect_uris": [redirect]}).json()
        return made["client_id"], made["client_secret"]

    def agree(self, address: str, subject: str) -> str:
        """What somebody does there: say who they are. Where the browser is sent then."""
        assert httpx.get(address).status_code == 200
        answer = httpx.post(address, data={"sub": subject})
        assert answer.status_code == 302, answer.text
        return answer.headers["location"]

    def deny(self, address: str) -> str:
        return httpx.post(address, data={"action": "deny"}).headers["location"]


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever had enough of a huge answer has hung up."""


@dataclass
class Liar:
    """A provider whose every word can be changed. By itself it tells the truth."""

    key: Key = field(default_factory=usual_key)
    claims: dict[str, Any] = field(default_factory=dict)
    """Put over what a token says; None takes a claim out."""
    header: dict[str, Any] = field(default_factory=dict)
    described: dict[str, Any] = field(default_factory=dict)
    """Put over its description."""
    bodies: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Said instead, by path."""
    sign: Callable[[dict[str, Any], bytes], str] | None = None
    hits: Counter[str] = field(default_factory=Counter)

    def __enter__(self) -> Liar:
        liar = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                liar._answer(self, b"")

            def do_POST(self) -> None:
                liar._answer(self, self.rfile.read(int(self.headers.get("content-length", 0))))

            def log_message(self, *arguments: object) -> None:
                """Nothing."""

        self._codes: dict[str, dict[str, str]] = {}
        self._server = _Quiet(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def issuer(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def agree(self, address: str) -> str:
        """Where the browser is sent after its visit to `address`."""
        asked = dict(parse_qsl(urlsplit(address).query, strict_parsing=True))
        code = os.urandom(8).hex()
        self._codes[code] = asked
        return f"{asked['redirect_uri']}?code={code}&state={asked['state']}"

    def token(self, nonce: str) -> str:
        """An ID token."""
        now = int(time.time())
        claims = {
            "iss": self.issuer,
            "aud": CLIENT,
            "sub": "u-1",
            "exp": now + 3600,
            "iat": now,
            "nonce": nonce,
            "email": "ana@example.org",
            "email_verified": True,
            "groups": ["ops"],
        }
        said = {name: value for name, value in (claims | self.claims).items() if value is not None}
        header = {"alg": "RS256", "kid": self.key.kid} | self.header
        payload = json.dumps(said).encode()
        if self.sign is not None:
            return self.sign(header, payload)
        return jws.serialize_compact(header, payload, self.key, algorithms=[header["alg"]])

    def _answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        path = urlsplit(request.path).path
        self.hits[path] += 1
        status, said = self.bodies.get(path) or self._said(path, request, body)
        request.send_response(status)
        request.send_header("content-length", str(len(said)))
        request.send_header("content-type", "application/json")
        request.end_headers()
        request.wfile.write(said)

    def _said(self, path: str, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        if path == "/.well-known/openid-configuration":
            places = {
                "issuer": self.issuer,
                "authorization_endpoint": f"{self.issuer}/authorize",
                "token_endpoint": f"{self.issuer}/token",
                "jwks_uri": f"{self.issuer}/keys",
            }
            return 200, json.dumps(places | self.described).encode()
        if path == "/keys":
            return 200, json.dumps({"keys": [self.key.as_dict(private=False)]}).encode()
        if path == "/token":
            return self._exchange(request, {name: one for name, (one,) in parse_qs(body.decode()).items()})
        return 404, b""

    def _exchange(self, request: BaseHTTPRequestHandler, form: dict[str, str]) -> tuple[int, bytes]:
        asked = self._codes.pop(form.get("code", ""), None)
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        pair = base64.b64decode(request.headers.get("authorization", "").removeprefix("Basic ")).decode()
        client = [unquote_plus(one) for one in pair.split(":")]
        if self.described.get("token_endpoint_auth_methods_supported") == ["client_secret_post"]:
            client = [form.get("client_id", ""), form.get("client_secret", ""), *filter(None, client)]
        if client != [CLIENT, SECRET]:
            return 401, b'{"error": "invalid_client"}'
        if (
            asked is None
            or asked["code_challenge_method"] != "S256"
            or asked["code_challenge"] != base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            or asked["redirect_uri"] != form["redirect_uri"]
        ):
            return 400, b'{"error": "invalid_grant"}'
        return 200, json.dumps({"id_token": self.token(asked["nonce"]), "access_token": "x"}).encode()
