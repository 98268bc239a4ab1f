"""What happens, as it happens: `tail` as lines and on a terminal, and `forward` to a server of one's own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oncehook.cli.tail import Screen, decode_events
from oncehook.model import Arrival
from oncehook.verify.standard import StandardWebhooks
from tests.acceptance.test_admin_cli import Admin, Sink
from tests.cli.conftest import Process

Begin = Callable[..., Process]


def test_lines_as_it_happens_on_each_engine(admin: Admin, begin: Begin) -> None:
    """Beside the server of a SQLite file by its stream; on PostgreSQL, where none is named, by looking."""
    tail = begin(admin.receiver.folder, "tail")
    tail.wait_for("watching", "err")
    [sent] = admin.send("o1", customer="42")
    admin.wait_for("done", "o1")
    tail.wait_for("→ crm  done")
    admin.die("o2")
    tail.wait_for("→ crm  dead")
    first, *_, last = tail.out.splitlines()
    assert re.match(rf"\d\d:\d\d:\d\d  {sent['event_id']}  orders order.paid  accepted  42", first)
    assert "HTTP 400" in last
    assert tail.end() == 0, "Ctrl-C is how it ends"


def test_only_what_is_wanted_and_as_json(here: Admin, begin: Begin) -> None:
    folder = here.receiver.folder
    by_status = begin(folder, "tail", "--status", "duplicate", "--status", "rejected", "--json")
    by_subject = begin(folder, "tail", "--subject", "7", "--source", "orders", "--json")
    for one in (by_status, by_subject):
        one.wait_for("watching", "err")
    here.send("a", "a", customer="42")
    here.send("b", customer="7")
    by_subject.wait_for('"outcome": "done"')
    by_status.wait_for("duplicate")
    assert [json.loads(line)["outcome"] for line in by_status.out.splitlines()] == ["duplicate"]
    assert {json.loads(line)["subject"] for line in by_subject.out.splitlines()} == {"7"}
    assert [json.loads(line)["moment"] for line in by_subject.out.splitlines()] == ["arrival", "attempt"]
    assert (by_status.end(), by_subject.end()) == (0, 0)


def test_a_server_that_goes_and_comes_back(here: Admin, begin: Begin) -> None:
    """The token beside a SQLite file is another one after every start: it is looked up again."""
    tail = begin(here.receiver.folder, "tail")
    tail.wait_for("watching", "err")
    here.receiver.stop()
    tail.wait_for("the connection is lost", "err")
    here.receiver.start()
    tail.wait_for("connected again", "err")
    here.send("o1")
    tail.wait_for("→ crm  done")
    assert tail.end() == 0


def test_nobody_to_listen_to(here: Admin) -> None:
    """On SQLite it never takes the file from the server that is about to start."""
    here.receiver.stop()
    done = here.run("tail")
    assert (done.code, done.out) == (3, "")
    assert "oncehook serve" in done.err
    wrong = here.run("tail", "--server", "http://127.0.0.1:1", "--token-env", "ADMIN")
    assert (wrong.code, wrong.out) == (3, "")
    here.receiver.start()
    stranger = here.run("tail", "--server", f"http://127.0.0.1:{here.receiver.port}")
    assert (stranger.code, stranger.out) == (2, "")


def test_a_stream_is_read_event_by_event() -> None:
    lines = iter([b"retry: 2000", b": hello", b"", b"event: arrival", b'data: {"a": "b: c"}', b"", b"event: x", b""])
    assert list(decode_events(lines)) == [("arrival", {"a": "b: c"})]


# -- on a terminal -----------------------------------------------------------------------------


def test_rules(here: Admin, begin: Begin) -> None:
    tail = begin(here.receiver.folder, "tail", terminal=True)
    tail.wait_for("j k move")
    [event_id] = here.die("o1", note="the body of it")
    tail.wait_for("dead")
    tail.type("k")
    tail.wait_for("\x1b[7m")
    tail.type("\r")
    tail.wait_for("the body of it")
    tail.type("x")
    here.sink.status = 200
    tail.type("r")
    tail.wait_for("replay 1 delivery to crm? [y/N]")
    tail.type("n")
    tail.wait_for("nothing was done")
    assert here.stand() == {"o1": "dead"}, "one key alone replays nothing"
    asked = tail.out.count("[y/N]")
    tail.type("r")
    tail.wait_for("[y/N]", times=asked + 1)
    tail.type("y")
    tail.wait_for("rpl_")
    here.wait_for("done", "o1")
    tail.type("q")
    assert tail.process.wait() == 0
    assert tail.end() == 0
    assert tail.out.rstrip().endswith("\x1b[?25h\x1b[?1049l"), "the terminal is given back"
    assert event_id in tail.out


class Nothing:
    def take(self, seconds: float) -> list[tuple[str, dict[str, object]]]:
        return []


def test_what_is_chosen_stays_chosen_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Nothing()
    screen = Screen(None, feed, lambda moment: True)  # type: ignore[arg-type]
    assert screen.lines(80, 5)[0] == "waiting for something to happen"
    waiting = [("watermark", {"watermark": f"w{n}", "crossed": True, "level": n, "limit": 1}) for n in range(30)]
    monkeypatch.setattr(feed, "take", lambda seconds: [waiting.pop(0)] if waiting else [])
    for _ in range(10):
        screen._listen()
    assert "w9" in screen.lines(80, 5)[3], "it follows the newest"
    for _ in range(6):
        screen.press("k")
    chosen = [line for line in screen.lines(80, 5) if "\x1b[7m" in line]
    assert ["w3" in line for line in chosen] == [True]
    screen._listen()
    assert [line for line in screen.lines(80, 5) if "\x1b[7m" in line] == chosen
    for _ in range(40):
        screen.press("k")
        screen.press("j")
        assert len(screen.lines(20, 5)) == 5
    screen.press("\n")
    assert "there is no event behind this line" in screen.lines(80, 5)[-1]


# -- forward -----------------------------------------------------------------------------------


@pytest.fixture
def app() -> Iterator[Sink]:
    """A server of one's own."""
    made = Sink()
    yield made
    made.end()


def test_live_arrivals_reach_a_server_of_ones_own(admin: Admin, begin: Begin, app: Sink, tmp_path: Path) -> None:
    admin.send("before")
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    asked = (admin.receiver.folder, "forward", "orders", "--to", f"http://127.0.0.1:{app.port}/hooks")
    forward = begin(*asked, **state)
    forward.wait_for("secret", "err")
    admin.send("o1", "o1", "o2", customer="42")
    forward.wait_for("→ 200 in", times=2)
    assert [json.loads(body)["id"] for body in app.bodies] == ["o1", "o2"], "each once, and nothing from before"
    app.status = 500
    admin.send("o3")
    forward.wait_for("→ 500 in")
    app.end()
    admin.send("o4")
    forward.wait_for("→ no answer")
    assert forward.end() == 0
    [secret] = re.findall(r"whsec_\S+", forward.err)
    again = begin(*asked, **state)
    again.wait_for(secret, "err")
    assert again.end() == 0, "the secret stays the same"


def test_it_is_signed_as_a_destination_would(here: Admin, begin: Begin, app: Sink, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{app.port}/x"
    asked = ("forward", "orders", "--to", url, "--type", "order.*", "--json")
    forward = begin(here.receiver.folder, *asked, XDG_STATE_HOME=str(tmp_path / "state"))
    forward.wait_for("secret", "err")
    here.send("other", type="refund")
    [sent] = here.send("o1", customer="ö 42")
    forward.wait_for("http_status")
    assert forward.end() == 0
    [secret], [head], [body] = re.findall(r"whsec_\S+", forward.err), app.heads, app.bodies
    arrival = Arrival("", [(name.encode(), value.encode()) for name, value in head.items()], body)
    StandardWebhooks().verifier([secret.encode()])(arrival)
    assert head["webhook-id"] == head["idempotency-key"] == sent["event_id"] == json.loads(forward.out)["event_id"]
    assert head["oncehook-subject"] == "%C3%B6%2042"
    assert head["content-type"] == "application/json"


def test_who_is_told_that_ctrl_c_ends_it_may_end_it(here: Admin) -> None:
    """However soon."""
    code = (
        "import signal; from oncehook.cli import main, send; "
        "send.say = lambda *_, **__: signal.raise_signal(signal.SIGINT); main()"
    )
    words = [sys.executable, "-c", code, "forward", "orders", "--to", "http://127.0.0.1:1/"]
    ended = subprocess.run(words, cwd=here.receiver.folder, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_forward_knows_its_sources(here: Admin) -> None:
    done = here.run("forward", "ordres", "--to", "http://127.0.0.1:1/")
    assert (done.code, done.out) == (2, "")
    assert 'Did you mean "orders"?' in done.err
    assert here.run("forward", "orders", "--to", "nowhere").code == 2
