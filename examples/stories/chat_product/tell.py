"""Twenty customers join, fifty messages come to each of their numbers, three times each, and one webhook is slow.

The product is `app.py`, served by a process of its own; all of this goes over HTTP. The messages of all customers have
the same ids, because nothing but the account may keep them apart.
"""

import base64
import hashlib
import hmac
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from customers import Customers

HERE = Path(__file__).parent
ACCOUNTS = [str(number) for number in range(1, 21)]
SLOW = "7"
PEOPLE, MESSAGES, COPIES = 25, 2, 3
"""People who write to each customer, messages of each, and how often Meta delivers one."""

SECRETS = {
    "META_APP_SECRET": "app secret",
    "META_VERIFY_TOKEN": "hello",
    "ONCEHOOK_TOKEN": "admin-" + os.urandom(16).hex(),
    "CUSTOMER_TOKEN": "customer-" + os.urandom(16).hex(),
    "ONCEHOOK_SECRET_KEY": base64.b64encode(os.urandom(32)).decode(),
}
"""What the operator gives to the server."""


class Server:
    """The product's server, in a process of its own."""

    def __init__(self, folder: str) -> None:
        self.port = int(os.environ.get("PORT", "8000"))
        store = os.environ.get("STORE", f"sqlite:{folder}/oncehook.db")
        command = [sys.executable, "-m", "oncehook", "serve", "app:inbox", "--port", str(self.port), "--quiet"]
        with Path(folder, "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=HERE, env={**os.environ, **SECRETS, "STORE": store}, stdout=log, stderr=log
            )
        self._connections = threading.local()
        while not self._is_ready():
            if self._process.poll() is not None:
                sys.exit(Path(folder, "log").read_text())
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        with suppress(OSError):
            return self.ask("GET", "/readyz")[0] == 200
        return False

    def ask(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Make a request on a connection of this thread's own."""
        if not hasattr(self._connections, "own"):
            self._connections.own = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection: http.client.HTTPConnection = self._connections.own
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except OSError:
            connection.close()
            raise

    def call(self, method: str, path: str, data: object = None, token: str = "ONCEHOOK_TOKEN") -> Any:
        """Call the API, as the operator or as a customer."""
        headers = {"authorization": f"Bearer {SECRETS[token]}", "content-type": "application/json"}
        status, answer = self.ask(method, f"/api/v1/{path}", json.dumps(data).encode() if data else b"", headers)
        if status >= 300:
            raise RuntimeError(f"{method} {path}: {status} {answer}")
        return answer

    def wait_until_done(self) -> None:
        """Wait until no delivery is left to be made."""
        while any(self.call("GET", "stats")["by_status"][status] for status in ("pending", "leased")):
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def phone_of(account: str) -> str:
    return f"10654035224{account:0>4}"


def sign_up(server: Server, customers: Customers, account: str) -> None:
    """Make a customer: its number is an alias, its webhook a destination that subscribes."""
    server.call("POST", "accounts", {"id": account, "aliases": [phone_of(account)]})
    webhook = {
        "name": f"webhook-{account}",
        "account": account,
        "url": customers.join(account),
        "subscribe": ["message_created"],
        "sign": "generate",
        "timeout": "10m",  # so that the slow one is waited for
        "allow_private": True,  # their servers are on this machine
    }
    secret = server.call("POST", "destinations", webhook)["secret"]
    customers.secrets[account] = base64.b64decode(secret.removeprefix("whsec_"))


def message(phone: str, person: int, number: int) -> bytes:
    """A message as Meta sends it."""
    sender = f"551198888{person:0>4}"
    value = {
        "messaging_product": "whatsapp",
        "metadata": {"display_phone_number": "15550783881", "phone_number_id": phone},
        "contacts": [{"profile": {"name": "Ana"}, "wa_id": sender}],
        "messages": [
            {
                "from": sender,
                "id": f"wamid.{person}.{number}",
                "timestamp": "1760000000",
                "type": "text",
                "text": {"body": f"message {number}"},
            }
        ],
    }
    change = {"field": "messages", "value": value}
    return json.dumps({"object": "whatsapp_business_account", "entry": [{"id": "1", "changes": [change]}]}).encode()


def deliver(server: Server, body: bytes) -> Any:
    """Deliver as Meta does."""
    signature = hmac.new(SECRETS["META_APP_SECRET"].encode(), body, hashlib.sha256).hexdigest()
    headers = {"content-type": "application/json", "x-hub-signature-256": f"sha256={signature}"}
    status, answer = server.ask("POST", "/in/whatsapp", body, headers)
    if status != 200:
        raise RuntimeError(f"{status} {answer}")
    return answer


def deliver_all(server: Server) -> Counter[str]:
    """Deliver all messages, those of a person one after the other, the copies of each at once; count the answers."""
    said = Counter[str]()
    with ThreadPoolExecutor(12) as meta:
        for number in range(MESSAGES):
            bodies = [message(phone_of(account), person, number) for account in ACCOUNTS for person in range(PEOPLE)]
            copies = chain.from_iterable([body] * COPIES for body in bodies)
            said.update(answer["status"] for answer in meta.map(lambda body: deliver(server, body), copies))
    return said


def judge(customers: Customers, account: str) -> str:
    """What a customer was told: nothing twice, nothing missing, nobody else's, each person's messages in order."""
    told = customers.told[account]
    expected = [f"message {number}" for number in range(MESSAGES)]
    if any(whose != account for whose, _, _ in told):
        return "another account's"
    people: dict[str, list[str]] = {}
    for _, person, text in told:
        people.setdefault(person, []).append(text)
    if len(people) == PEOPLE and all(texts == expected for texts in people.values()):
        return "each once"
    return "not each once, in order"


def account_of(server: Server, event_id: str) -> str | None:
    account: str | None = server.call("GET", f"events/{event_id}")["account"]
    return account


def tell() -> None:
    print("20 customers with a WhatsApp number and a webhook each")
    with tempfile.TemporaryDirectory() as folder:
        customers, server = Customers(SLOW), Server(folder)
        try:
            for account in ACCOUNTS:
                sign_up(server, customers, account)
            said = deliver_all(server)
            say("messages come in", f"{said['accepted']} accepted, {said['duplicate']} duplicates.")
            stray = deliver(server, message("nobody's number", 0, 0))["event_id"]

            others = [account for account in ACCOUNTS if account != SLOW]
            customers.wait_until(others, PEOPLE * MESSAGES)
            customers.wait_until_asked(SLOW)
            answered = len(customers.told[SLOW])
            say("one webhook is slow", f"{answered} answered there; the other {len(others)} have all of theirs.")
            customers.let_go()
            server.wait_until_done()

            verdicts = Counter(judge(customers, account) for account in ACCOUNTS)
            count = sum(map(len, customers.told.values()))
            say("webhooks go out", f"{count}; {', '.join(f'{n} customers: {what}' for what, n in verdicts.items())}.")
            say("wrong signatures", f"{customers.forged}.")
            say("a number of nobody", f"kept, account {json.dumps(account_of(server, stray))}, told to nobody.")
            mine = server.call("GET", "events?query=type:message_created&limit=200", token="CUSTOMER_TOKEN")["items"]
            seen = " and ".join(sorted({event["account"] for event in mine}))
            say("a customer's token", f"sees {len(mine)} of {count} events, all of account {seen}.")
        finally:
            customers.let_go()
            server.stop()


def say(who: str, what: str) -> None:
    print(f"  {who:<25} {what}", flush=True)


if __name__ == "__main__":
    tell()
