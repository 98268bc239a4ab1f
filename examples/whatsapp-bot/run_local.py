"""The bot as a whole on this machine: WhatsApp's APIs, n8n and the storage are stand-ins, everything else is real.

A tunnel hands every hook on twice and is away at first; n8n is away at first, too. Prints what happened.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from oncehook.testing.standins import (
    EvolutionApiStandIn,
    EvolutionGoStandIn,
    MetaStandIn,
    N8nStandIn,
    S3StandIn,
    Tunnel,
)

ANA, RUI = "5511988880142", "5511966660177"
ONCEHOOK = [sys.executable, "-m", "oncehook"]


class Town:
    """Everything around the bot."""

    def __init__(self, stack: ExitStack) -> None:
        start: Callable[[Any], Any] = stack.enter_context
        self.meta: MetaStandIn = start(MetaStandIn())
        self.evolution: EvolutionApiStandIn = start(EvolutionApiStandIn())
        self.go: EvolutionGoStandIn = start(EvolutionGoStandIn())
        self.n8n: N8nStandIn = start(N8nStandIn("whatsapp"))
        self.s3: S3StandIn = start(S3StandIn())
        self.way_out: Tunnel = start(Tunnel(self.n8n.url, copies=1, flap_every=2, flap_first=True))

    def environment(self, folder: str) -> dict[str, str]:
        """The settings of `oncehook.toml` that are different here, and the secrets it refers to."""
        said = {
            "META_APP_SECRET": self.meta.secret,
            "META_VERIFY_TOKEN": "any",
            "META_TOKEN": self.meta.token,
            "EVOLUTION_JWT_KEY": self.evolution.secret,
            "EVOLUTION_API_KEY": self.evolution.api_key,
            "EVOLUTION_GO_TOKEN": self.go.token,
            "ONCEHOOK_STORE": os.environ.get("STORE", f"sqlite:{folder}/oncehook.db"),
            "ONCEHOOK_DESTINATION__N8N__URL": f"{self.way_out.url}/webhook/whatsapp",
        }
        places = {"ANSWERS_META": self.meta, "ANSWERS_EVOLUTION": self.evolution, "ANSWERS_GO": self.go}
        for name, standin in places.items():
            said[f"ONCEHOOK_DESTINATION__{name}__WHATSAPP__BASE_URL"] = standin.url
        for name in (*places, "N8N"):
            said[f"ONCEHOOK_DESTINATION__{name}__ALLOW_PRIVATE"] = "true"
            said[f"ONCEHOOK_DESTINATION__{name}__RETRY"] = '{ attempts = 12, base = "0.3s", cap = "1s" }'
        storage = {} if "ONCEHOOK_S3_BUCKET" in os.environ else self.s3.environ
        return {**os.environ, **storage, **said}


@contextmanager
def bot(environment: dict[str, str], log: Path) -> Iterator[str]:
    """`oncehook serve app:inbox`, on a free port."""
    with log.open("wb") as output:
        command = [*ONCEHOOK, "serve", "app:inbox", "--port", "0"]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=Path(__file__).parent)
    try:
        until(lambda: "ready on" in log.read_text() or process.poll() is not None, "the bot is ready")
        found = re.search(r"ready on (http://[^ ]+?)/?\s", log.read_text())
        if found is None:
            sys.exit(log.read_text())
        yield found[1]
    finally:
        process.terminate()
        process.wait(30)


def until(is_so: Callable[[], object], what: str) -> None:
    for _ in range(3000):
        if is_so():
            return
        time.sleep(0.02)
    sys.exit(f"It did not happen that {what}.")


def say(text: str) -> None:
    print(text, flush=True)


def ask_all(town: Town, url: str, text: str) -> None:
    """Ana writes the same over each of the three."""
    for name, standin in (("meta", town.meta), ("evolution", town.evolution), ("go", town.go)):
        hook = standin.message(from_=ANA, text=text)
        with Tunnel(url, copies=2, flap_every=2, flap_first=True) as tunnel:
            before = len(standin.sent)
            answers = standin.deliver_blocking(f"{tunnel.url}/in/{name}", hook, retries=3)
            until(lambda: len(standin.sent) > before, f"{name} was answered")  # noqa: B023 - called at once
        said = ", ".join(str(answer.status) for answer in answers)
        sent = standin.sent[-1]
        say(f'{name}: "{text}" was answered {said}; handed on {tunnel.handed_on} times, sent: {sent.type}')


def fetch_file(town: Town) -> None:
    document = town.meta.sent[-1].body["document"]
    with urllib.request.urlopen(document["link"]) as answer:
        say(f"WhatsApp fetches {document['filename']}: {len(answer.read())} bytes")


def statuses(town: Town, url: str) -> None:
    """One batch: how far the first answer has come, in the wrong order, and a message of somebody else."""
    first = town.meta.sent[0]
    town.meta.delay(0.5)  # Meta takes its time over the next answer
    batch = [town.meta.status(first, word) for word in ("sent", "read", "delivered")]
    rui = town.meta.message(from_=RUI, text="Are you open?")
    (answer,) = town.meta.deliver_blocking(f"{url}/in/meta", *batch, rui)
    until(lambda: town.meta.sent[-1].to == RUI and len(words(town)) == 2, "the batch was worked off")
    say(f"a batch of 4: {answer.json()['accepted']} events; n8n was told {' and '.join(words(town))}")


def words(town: Town) -> list[str]:
    """Of which statuses n8n was told."""
    values = [run.body["entry"][0]["changes"][0]["value"] for run in town.n8n.executions if "entry" in run.body]
    return [value["statuses"][0]["status"] for value in values if "statuses" in value]


def offline(town: Town, url: str) -> None:
    """The phone behind Evolution is away for a moment."""
    before = len(town.evolution.sent)
    town.evolution.go_offline()
    town.evolution.deliver_blocking(f"{url}/in/evolution", town.evolution.message(from_=RUI, text="Hi"))
    until(lambda: any(RUI.encode() in request.body for request in town.evolution.requests), "the bot has tried")
    town.evolution.go_online()
    until(lambda: len(town.evolution.sent) > before, "the phone is back")
    say("evolution: the phone was offline, and the answer went out when it was back")


def dead_letter(town: Town, url: str, environment: dict[str, str]) -> None:
    """The token has expired: the answer is kept as a dead letter, and a person replays it."""
    before = len(town.meta.sent)
    town.meta.expire_token()
    town.meta.deliver_blocking(f"{url}/in/meta", town.meta.message(from_=RUI, text="Hello?"))

    def command(*words: str) -> str:
        ran = subprocess.run([*ONCEHOOK, *words], env=environment, cwd=Path(__file__).parent, capture_output=True)
        return ran.stdout.decode()

    until(lambda: "unauthorized 190" in command("dead", "--app", "app:inbox"), "the answer is a dead letter")
    town.meta.renew_token()
    command("replay", "--app", "app:inbox", "--query", "status:dead", "--yes", "--wait")
    say(f"meta: the token had expired; after a replay {len(town.meta.sent) - before} answer arrived")


def main() -> None:
    with ExitStack() as stack:
        town = Town(stack)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        environment = town.environment(folder)
        with bot(environment, Path(folder) / "log") as url:
            ask_all(town, url, "Hi")
            ask_all(town, url, "Send me the price list")
            fetch_file(town)
            statuses(town, url)
            offline(town, url)
            dead_letter(town, url, environment)
            until(lambda: len(town.n8n.executions) == 11, "n8n heard of everything")
        runs = town.n8n.executions
        late = sum(run.headers["oncehook-attempt"] != "1" for run in runs)
        say(f"n8n ran {len(runs)} times, {late} of them on attempt 2 or later")
        say(f"phones rang {sum(len(one.sent) for one in (town.meta, town.evolution, town.go))} times")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the bot ends with us
    main()
