"""`oncehook whatsapp …` against stand-ins over real HTTP: JSON on stdout, one line on stderr, exit codes that tell."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from oncehook.cli import main
from oncehook.retry import NAMED, Policy
from oncehook.testing.standins import EvolutionApiStandIn, EvolutionGoStandIn, MetaStandIn, S3StandIn
from tests.whatsapp.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, fresh_prefix, shared_s3

NUMBER = "+55 (11) 99999-0001"
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 64


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """One command, as a user would, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def running(*arguments: str, **env: str) -> Ran:
        with monkeypatch.context() as here:
            for name, value in env.items():
                here.setenv(name, value)
            here.setattr(sys, "argv", ["oncehook", "whatsapp", *arguments])
            with pytest.raises(SystemExit) as ended:
                main()
        said = capsys.readouterr()
        return Ran(int(ended.value.code or 0), said.out, said.err)

    monkeypatch.setitem(NAMED, "quick", Policy(attempts=3, waits=(0.0, 0.0)))
    return running


@pytest.fixture
def meta() -> Iterator[MetaStandIn]:
    with MetaStandIn() as standin:
        yield standin


def speaking_to(meta: MetaStandIn) -> dict[str, str]:
    return {
        "ONCEHOOK_WHATSAPP_API": "meta",
        "ONCEHOOK_WHATSAPP_BASE_URL": meta.url,
        "ONCEHOOK_WHATSAPP_TOKEN": meta.token,
        "ONCEHOOK_WHATSAPP_PHONE_NUMBER_ID": meta.phone_number_id,
    }


def settings(meta: MetaStandIn) -> str:
    return f"""
[destination.answers]
allow_private = ["127.0.0.0/8"]
[destination.answers.whatsapp]
api = "meta"
base_url = "{meta.url}"
token = {{ env = "META_TOKEN" }}
phone_number_id = "{meta.phone_number_id}"
country = 55
"""


# -- sending -----------------------------------------------------------------------------------


def test_a_text_by_variables(run: Run, meta: MetaStandIn) -> None:
    ran = run("send-text", NUMBER, "On its way", "--allow-private", **speaking_to(meta))
    (sent,) = meta.sent
    assert (ran.code, ran.json) == (0, {"message_id": sent.id, "status": 200, "attempts": 1}), ran.err
    assert (sent.to, sent.text) == ("5511999990001", "On its way")


def test_a_text_by_a_destination_of_the_settings(run: Run, meta: MetaStandIn, tmp_path: Path) -> None:
    (tmp_path / "oncehook.toml").write_text(settings(meta))
    ran = run("send-text", "11 99999-0001", "Local", "--destination", "answers", META_TOKEN=meta.token)
    assert (ran.code, ran.err, meta.sent[0].to) == (0, "", "5511999990001")
    lost = run("send-text", NUMBER, "x", "--destination", "answer", META_TOKEN=meta.token)
    assert (lost.code, lost.out) == (2, "")
    assert 'Did you mean "answers"?' in lost.err


def test_every_kind_of_message(run: Run, meta: MetaStandIn) -> None:
    how = ("--allow-private",)
    env = speaking_to(meta)
    first = run("send-text", NUMBER, "Hello", *how, **env).json["message_id"]
    parts = '[{"type": "body", "parameters": [{"type": "text", "text": "42"}]}]'
    assert (
        run("send-template", NUMBER, "order_ready", "--language", "pt_BR", "--components", parts, *how, **env).code == 0
    )
    assert run("react", NUMBER, first, "👍", "--from-me", *how, **env).code == 0
    assert run("read", "wamid.in", *how, **env).code == 0
    assert [sent.type for sent in meta.sent] == ["text", "template", "reaction"]
    assert meta.sent[1].body["template"]["language"] == {"code": "pt_BR"}
    assert meta.read == ["wamid.in"]


def test_a_file_goes_through_the_bucket(run: Run, meta: MetaStandIn, tmp_path: Path) -> None:
    (tmp_path / "photo.bin").write_bytes(PNG)
    storage = {
        "ONCEHOOK_S3_BUCKET": BUCKET,
        "ONCEHOOK_S3_ENDPOINT": shared_s3().endpoint,
        "ONCEHOOK_S3_ACCESS_KEY": ACCESS_KEY,
        "ONCEHOOK_S3_SECRET_KEY": SECRET_KEY,
        "ONCEHOOK_S3_PREFIX": fresh_prefix(),
    }
    command = ("send-file", NUMBER, "photo.bin", "--caption", "Your order", "--allow-private")
    ran = run(*command, **speaking_to(meta), **storage)
    assert ran.code == 0, ran.err
    (sent,) = meta.sent
    assert (sent.type, sent.body["image"]["caption"]) == ("image", "Your order")
    assert SECRET_KEY not in ran.out + ran.err
    without = run(*command, **speaking_to(meta))
    assert (without.code, without.out) == (2, "")
    assert "no storage for files" in without.err


def test_a_bucket_by_the_names_that_people_have(run: Run, meta: MetaStandIn, tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(PNG)
    with S3StandIn("media") as s3:
        storage = {"R2_BUCKET": "media", "R2_ENDPOINT": s3.url, "R2_ACCESS_KEY_ID": "k", "R2_SECRET_ACCESS_KEY": "s"}
        ran = run("send-file", NUMBER, "photo.png", "--allow-private", **speaking_to(meta), **storage)
        assert (ran.code, len(s3.objects)) == (0, 1), ran.err


def test_instances(run: Run) -> None:
    with EvolutionApiStandIn() as evolution:
        env = {
            "ONCEHOOK_WHATSAPP_API": "evolution-api",
            "ONCEHOOK_WHATSAPP_BASE_URL": evolution.url,
            "ONCEHOOK_WHATSAPP_API_KEY": evolution.api_key,
            "ONCEHOOK_WHATSAPP_INSTANCE": evolution.instance,
        }
        ran = run("instance", "state", "--allow-private", **env)
        assert (ran.code, "open" in ran.out) == (0, True), ran.err
        assert run("send-text", NUMBER, "Hello", "--allow-private", **env).code == 0
        wrong = run("instance", "explode", "--allow-private", **env)
        assert (wrong.code, wrong.out) == (2, "")
        assert "there are create, connect" in wrong.err
        assert run("instance", "state", "nonsense", "--allow-private", **env).code == 2
    with EvolutionGoStandIn() as go:
        env = {"ONCEHOOK_WHATSAPP_TOKEN": go.token, "ONCEHOOK_WHATSAPP_API_KEY": go.admin_key}
        ran = run(
            "instance", "status", "--api", "evolution-go", "--base-url", go.url, "--instance", go.instance_id,
            "--allow-private", **env,
        )  # fmt: skip
        assert isinstance(ran.json, dict), ran.err


def test_what_was_sent_can_be_looked_after(run: Run) -> None:
    with EvolutionGoStandIn() as go:
        env = {"EVOLUTION_GO_URL": go.url, "EVOLUTION_GO_INSTANCE_TOKEN": go.token, "EVOLUTION_GO_KEY": go.admin_key}
        link = "https://files.example/a.png"
        assert run("send-media", NUMBER, "image", link, "--caption", "See", "--allow-private", **env).code == 0
        assert run("send-media", NUMBER, "sticker", link, "--allow-private", **env).code == 0
        assert [(sent.type, sent.body.get("caption")) for sent in go.sent] == [("image", "See"), ("sticker", None)]
        for command in (
            ("edit", NUMBER, "3EB0", "Hi"),
            ("delete-message", NUMBER, "3EB0"),
            ("message-status", "3EB0"),
            ("presence", NUMBER, "composing"),
        ):
            ran = run(*command, "--allow-private", **env)
            assert (ran.code, ran.json["message"]) == (0, "success"), ran.err
        assert [what for what, _ in go.asked] == ["edit", "delete", "status", "presence"]
        assert run("instances", "--allow-private", **env).json["data"][0]["name"] == go.instance
        told = run("summary", "--allow-private", **env)
        assert told.json["instances"] == [{"name": go.instance, "id": go.instance_id, "connected": False}]
        assert go.token not in told.out
    refused = run("edit", NUMBER, "1", "x", "--api", "meta", "--phone-number-id", "1", ONCEHOOK_WHATSAPP_TOKEN="t-0123")
    assert (refused.code, '"meta" has no action "edit"' in refused.err) == (2, True)


def test_whatever_the_second_storys_client_sends(run: Run) -> None:
    with EvolutionGoStandIn() as go:
        env = {"EVOLUTION_GO_URL": go.url, "EVOLUTION_GO_INSTANCE_TOKEN": go.token, "EVOLUTION_GO_KEY": go.admin_key}
        for command in (
            ("send-location", NUMBER, "-23.5505", "-46.6333", "--name", "Shop"),
            ("send-contact", NUMBER, "Ana", NUMBER, "--organization", "Shop"),
            ("send-link", NUMBER, "https://a.example", "--text", "See", "--title", "A"),
            ("send-poll", NUMBER, "When?", "Today", "Later", "--max-answers", "2"),
            ("send-text", "120363@g.us", "Hi", "--delay", "1200", "--mention", NUMBER, "--mention", "+1 555 010 0200"),
            ("send-text", "120363@g.us", "Hi", "--mention-all", "--reply-to", "3EB0"),
        ):
            ran = run(*command, "--allow-private", **env)
            assert (ran.code, ran.err) == (0, "")
        location, contact, link, poll, mention, everybody = [sent.body for sent in go.sent]
        assert (location["latitude"], location["longitude"], location["name"]) == (-23.5505, -46.6333, "Shop")
        assert contact["vcard"] == {"fullName": "Ana", "phone": "5511999990001", "organization": "Shop"}
        assert (link["text"], link["title"]) == ("See https://a.example", "A")
        assert (poll["options"], poll["maxAnswer"]) == (["Today", "Later"], 2)
        assert mention["delay"] == 1200
        assert mention["mentionedJid"] == ["5511999990001@s.whatsapp.net", "15550100200@s.whatsapp.net"]
        assert (everybody["mentionAll"], everybody["quoted"]["messageId"]) == (True, "3EB0")
        wrong = run("send-poll", NUMBER, "When?", "Today", "--allow-private", **env)
        assert (wrong.code, "2 to 12 different options" in wrong.err) == (2, True)
        assert len(go.sent) == 6


def test_anothers_message_is_deleted_in_a_group(run: Run) -> None:
    with EvolutionGoStandIn() as go:
        env = {"EVOLUTION_GO_URL": go.url, "EVOLUTION_GO_INSTANCE_TOKEN": go.token}
        ran = run("delete-message", "120363@g.us", "3EB0", "--participant", NUMBER, "--allow-private", **env)
        assert (ran.code, "takes to, message_id" in ran.err) == (2, True)  # Evolution Go knows only our own
        assert not go.asked
    with EvolutionApiStandIn() as api:
        env = {"EVOLUTION_API_URL": api.url, "EVOLUTION_API_KEY": api.api_key}
        ran = run(
            "delete-message", "120363@g.us", "3EB0", "--participant", NUMBER, "--instance", api.instance,
            "--allow-private", **env,
        )  # fmt: skip
        assert ran.code == 0, ran.err
        author = {"participant": "5511999990001@s.whatsapp.net"}
        assert api.deleted == [{"id": "3EB0", "remoteJid": "120363@g.us", "fromMe": False, **author}]


# -- the environment of those who move in ------------------------------------------------------


def test_evolution_go_by_the_variables_that_people_have(run: Run) -> None:
    with EvolutionGoStandIn() as go:
        have = {"EVOLUTION_GO_URL": go.url, "EVOLUTION_GO_KEY": go.admin_key, "EVOLUTION_GO_INSTANCE_TOKEN": go.token}
        assert run("send-text", NUMBER, "Hello", "--allow-private", **have).code == 0
        assert run("instance", "info", "--instance", go.instance_id, "--allow-private", **have).code == 0
        only_a_key = {"EVOLUTION_GO_URL": go.url, "EVOLUTION_GO_KEY": go.token}
        assert run("send-text", NUMBER, "Hello", "--allow-private", **only_a_key).code == 0
        ours = {"ONCEHOOK_WHATSAPP_TOKEN": "another-token"}
        assert "unauthorized" in run("send-text", NUMBER, "Hello", "--allow-private", **have, **ours).err
        assert len(go.sent) == 2


def test_evolution_api_by_the_variables_that_people_have(run: Run) -> None:
    with EvolutionApiStandIn() as evolution:
        have = {"EVOLUTION_API_URL": evolution.url, "EVOLUTION_API_KEY": evolution.api_key}
        command = ("send-text", NUMBER, "Hello", "--instance", evolution.instance, "--allow-private")
        assert run(*command, **have).code == 0
        both = run(*command, **have, EVOLUTION_GO_URL="http://go.example")
        assert (both.code, "Which API?" in both.err) == (2, True)
        assert run(*command, "--api", "evolution-api", **have, EVOLUTION_GO_URL="http://go.example").code == 0


def test_their_key_goes_to_their_server_only(run: Run) -> None:
    with EvolutionGoStandIn() as go:
        have = {"EVOLUTION_GO_URL": "http://go.example", "EVOLUTION_GO_KEY": go.token}
        ran = run("send-text", NUMBER, "Hello", "--base-url", go.url, "--allow-private", **have)
        assert (ran.code, "ONCEHOOK_WHATSAPP_TOKEN" in ran.err) == (2, True)
        assert go.sent == []


def test_who_is_told_stands_in_a_variable(run: Run, meta: MetaStandIn) -> None:
    theirs = {"NOTIFY_WHATSAPP_PHONE": NUMBER}
    assert run("notify", "The backup is done.", "--allow-private", **speaking_to(meta), **theirs).code == 0
    ours = {"ONCEHOOK_WHATSAPP_NOTIFY_TO": "+55 11 99999-0002"}
    assert run("notify", "And again.", "--allow-private", **speaking_to(meta), **theirs, **ours).code == 0
    assert [sent.to for sent in meta.sent] == ["5511999990001", "5511999990002"]
    nobody = run("notify", "Hello?", "--allow-private", **speaking_to(meta))
    assert (nobody.code, "--to" in nobody.err) == (2, True)


def test_a_proxy_that_is_named_is_used_and_never_gone_round(run: Run, meta: MetaStandIn) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    proxy = {"WEBSHARE_PROXY_HOST": "127.0.0.1", "WEBSHARE_PROXY_PORT": port}
    ran = run("send-text", NUMBER, "Hello", "--allow-private", "--retry", "none", **speaking_to(meta), **proxy)
    assert (ran.code, "proxy" in ran.err, meta.sent) == (3, True, [])


# -- failing -----------------------------------------------------------------------------------


def test_a_refusal_is_one_line_with_its_code(run: Run, meta: MetaStandIn) -> None:
    meta.close_window("5511999990001")
    ran = run("send-text", NUMBER, "Too late", "--allow-private", **speaking_to(meta))
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert ran.err.startswith("oncehook: window_closed (131047): ")
    meta.expire_token()
    ran = run("send-text", NUMBER, "Hello", "--allow-private", **speaking_to(meta))
    assert (ran.code, "unauthorized (190)" in ran.err) == (1, True)
    assert meta.token not in ran.err


def test_nobody_there(run: Run, meta: MetaStandIn) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{free.getsockname()[1]}"
    command = ("send-text", NUMBER, "x", "--allow-private", "--base-url", away)
    ran = run(*command, "--retry", "none", **speaking_to(meta))
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.startswith("oncehook: unavailable: ")
    assert "tried" not in ran.err
    again = run(*command, **speaking_to(meta))
    assert (again.code, again.out, again.err.count("\n")) == (3, "", 1)
    assert "(tried 3 times)" in again.err


def test_what_may_pass_is_tried_again(run: Run, meta: MetaStandIn) -> None:
    meta.fail(503, times=2)
    ran = run("send-text", NUMBER, "Hello", "--allow-private", **speaking_to(meta))
    assert (ran.code, ran.json["attempts"], ran.err) == (0, 3, "")
    assert [sent.text for sent in meta.sent] == ["Hello"]
    meta.fail(503, times=1)
    once = run("send-text", NUMBER, "Hello", "--allow-private", "--retry", "none", **speaking_to(meta))
    assert (once.code, once.out, len(meta.sent)) == (1, "", 1)


@pytest.mark.parametrize(
    ("arguments", "env", "sentence"),
    [
        (("send-text", NUMBER, "x"), {}, "Which API?"),
        (("send-text", NUMBER, "x", "--api", "meta"), {}, "ONCEHOOK_WHATSAPP_TOKEN, ONCEHOOK_WHATSAPP_PHONE_NUMBER_ID"),
        (("send-text", NUMBER), {}, "Missing argument 'TEXT'"),
        (("send-text", NUMBER, "x", "--api", "metta"), {}, "is not one of"),
        (("send-text", "12", "x"), "meta", "invalid_number"),
        (("send-text", NUMBER, " "), "meta", "message_invalid"),
        (("send-template", NUMBER, "n", "--components", "{"), "meta", "--components"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], env: Any, sentence: str, run: Run, meta: MetaStandIn) -> None:
    ran = run(*arguments, "--allow-private", **(speaking_to(meta) if env == "meta" else env))
    assert (ran.code, ran.out, meta.sent) == (2, "", [])
    assert sentence in ran.err


def test_it_logs_one_structured_line_when_asked(meta: MetaStandIn, tmp_path: Path) -> None:
    env = {**os.environ, **speaking_to(meta)}
    command = [sys.executable, "-m", "oncehook", "whatsapp", "send-text", NUMBER, "Hello", "--allow-private", "-v"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=60, check=True)
    (logged,) = [json.loads(line) for line in ran.stderr.splitlines()]
    assert logged.items() >= {"event": "message.sent", "attempts": 1, "final_status": "done"}.items()


def test_in_a_process_of_its_own(meta: MetaStandIn, tmp_path: Path) -> None:
    env = {**os.environ, **speaking_to(meta)}
    command = [sys.executable, "-m", "oncehook", "whatsapp", "send-text", NUMBER, "Hello", "--allow-private"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["message_id"] == meta.sent[0].id
