"""The customers' own servers: each has an address, checks the signature, and remembers what it was told.

One of them is slow: it answers nobody until `let_go` is called.
"""

import base64
import hashlib
import hmac
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Told = tuple[str, str, str]
"""A message as a customer's server was told it: the account in it, the person who wrote it, and its text."""


class Customers(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, slow: str) -> None:
        super().__init__(("127.0.0.1", 0), Webhook)
        self.slow = slow
        self.secrets: dict[str, bytes] = {}
        self.told: dict[str, list[Told]] = {}
        """What each customer was told, in order."""
        self.forged = 0
        self.asked = Counter[str]()
        self.changed = threading.Condition()
        self._released = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def join(self, account: str) -> str:
        """Return the address of a customer's webhook."""
        self.told[account] = []
        return f"http://127.0.0.1:{self.server_address[1]}/{account}"

    def note(self, account: str, headers: dict[str, str], body: bytes) -> bool:
        """Take a request, or refuse it because its signature is wrong."""
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        expected = base64.b64encode(hmac.new(self.secrets[account], signed, hashlib.sha256).digest()).decode()
        with self.changed:
            self.asked[account] += 1
            self.changed.notify_all()
        if account == self.slow:
            self._released.wait()
        message = json.loads(body)
        with self.changed:
            is_genuine = f"v1,{expected}" in headers["webhook-signature"].split()
            if is_genuine:
                self.told[account].append((message["account"], message["from"], message["text"]))
            self.forged += not is_genuine
            self.changed.notify_all()
        return is_genuine

    def wait_until(self, accounts: list[str], count: int) -> None:
        """Wait until each of these was told so many."""
        with self.changed:
            self.changed.wait_for(lambda: all(len(self.told[account]) >= count for account in accounts))

    def wait_until_asked(self, account: str) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.asked[account] > 0)

    def let_go(self) -> None:
        self._released.set()


class Webhook(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Customers

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.send_response(200 if self.server.note(self.path.strip("/"), headers, body) else 401)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""
