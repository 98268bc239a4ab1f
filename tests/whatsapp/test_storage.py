"""Files in S3-compatible storage, against a real server that checks signatures, their age and every checksum."""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from oncehook.errors import ConfigError
from oncehook.secret import Secret
from oncehook.whatsapp.files import OPUS, FileTooLarge, FileUnreadable
from oncehook.whatsapp.storage import S3Files, StorageFailed, StoredFile
from tests.whatsapp.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, Relay, S3Server, fresh_prefix
from tests.whatsapp.test_files import JPEG, PDF, SAMPLES, mp4, ogg, webp

KEYS = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY}


def fetched(url: str, method: str = "GET") -> tuple[int, bytes, Mapping[str, str]]:
    """What anybody gets who has the link."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=30) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


async def fetch(url: str, method: str = "GET") -> tuple[int, bytes, Mapping[str, str]]:
    return await asyncio.to_thread(fetched, url, method)


# -- storing -----------------------------------------------------------------------------------


async def test_a_stored_file_says_what_it_is(storage: S3Files, s3: S3Server, tmp_path: Path) -> None:
    (tmp_path / "fatura.pdf").write_bytes(PDF)
    stored = await storage.store(tmp_path / "fatura.pdf")
    digest = hashlib.sha256(PDF).hexdigest()
    assert stored == StoredFile(stored.key, "document", "application/pdf", "fatura.pdf", len(PDF))
    assert stored.key.endswith(f"/{digest}.pdf")
    assert s3.objects(stored.key) == {stored.key: len(PDF)}


@pytest.mark.parametrize(
    ("data", "kind", "content_type"),
    [
        (JPEG, "image", "image/jpeg"),
        (mp4(b"isom", b"vide"), "video", "video/mp4"),
        (ogg(b"OpusHead"), "audio", OPUS),
        (webp(b"VP8X", 2), "sticker", "image/webp"),
        (SAMPLES["docx"][0], "document", SAMPLES["docx"][1]),
    ],
)
async def test_the_link_gives_the_bytes_with_their_type(
    storage: S3Files, data: bytes, kind: str, content_type: str
) -> None:
    stored = await storage.store(data)
    status, body, headers = await fetch(await storage.link(stored.key))
    assert (stored.kind, status, body) == (kind, 200, data)
    assert headers["content-type"] == content_type
    assert headers["content-disposition"].startswith("attachment")


async def test_a_type_without_an_ending_keeps_its_type(storage: S3Files) -> None:
    stored = await storage.store(bytes(range(256)), filename="model.wasm")
    assert not stored.key.endswith(".wasm")
    _, _, headers = await fetch(await storage.link(stored.key))
    assert headers["content-type"] == "application/wasm"


async def test_the_link_says_the_type_whatever_lies_there(storage: S3Files, s3: S3Server) -> None:
    stored = await storage.store(JPEG)
    client = s3.client()
    client.put_object(Bucket=BUCKET, Key=stored.key, Body=JPEG, ContentType="text/html")
    client.close()
    _, _, headers = await fetch(await storage.link(stored.key))
    assert headers["content-type"] == "image/jpeg"


async def test_the_same_content_is_uploaded_once(storage: S3Files, relay: Relay, s3: S3Server) -> None:
    first = await storage.store(JPEG, filename="one.jpg")
    again = await storage.store(JPEG, filename="two.jpg")
    assert (again.key, again.filename) == (first.key, "two.jpg")
    assert relay.count("PUT") == 1
    assert len(s3.objects(first.key)) == 1


async def test_another_process_knows_it_too(storage: S3Files, relay: Relay, s3: S3Server) -> None:
    stored = await storage.store(JPEG)
    prefix = stored.key.rpartition("/")[0] + "/"
    async with S3Files(BUCKET, endpoint=relay.endpoint, prefix=prefix, **KEYS) as other:
        assert await other.store(JPEG) == stored
    assert relay.count("PUT") == 1


async def test_many_at_once_are_harmless(storage: S3Files, s3: S3Server) -> None:
    data = JPEG + bytes(1 << 20)
    stored = await asyncio.gather(*(storage.store(data) for _ in range(8)))
    assert len(set(stored)) == 1
    assert s3.objects(stored[0].key) == {stored[0].key: len(data)}
    assert (await fetch(await storage.link(stored[0].key)))[1] == data


async def test_who_comes_second_does_not_write(storage: S3Files, relay: Relay, s3: S3Server) -> None:
    """Both saw nothing there; the server lets only one of them write."""
    stored = await storage.store(JPEG)
    client = s3.client()
    before = client.head_object(Bucket=BUCKET, Key=stored.key)["ResponseMetadata"]["HTTPHeaders"]
    answers = iter([False, True])
    storage._is_there = lambda key, size: next(answers)  # type: ignore[method-assign]
    assert await storage.store(JPEG) == stored
    after = client.head_object(Bucket=BUCKET, Key=stored.key)["ResponseMetadata"]["HTTPHeaders"]
    client.close()
    assert relay.count("PUT") == 2
    assert next(answers, "asked twice") == "asked twice"
    assert before["last-modified"] == after["last-modified"]


async def test_half_a_file_is_replaced(storage: S3Files, s3: S3Server) -> None:
    stored = await storage.store(JPEG)
    client = s3.client()
    client.put_object(Bucket=BUCKET, Key=stored.key, Body=JPEG[:5])
    client.close()
    await storage.store(JPEG)
    assert s3.objects(stored.key) == {stored.key: len(JPEG)}


async def test_what_whatsapp_would_refuse_is_not_uploaded(storage: S3Files, relay: Relay, tmp_path: Path) -> None:
    with pytest.raises(FileTooLarge):
        await storage.store(JPEG + bytes(6 << 20))
    with pytest.raises(FileUnreadable):
        await storage.store(tmp_path / "none.jpg")
    assert relay.requests == []
    assert (await storage.store(JPEG + bytes(6 << 20), kind="document")).kind == "document"


async def test_limits_are_settings(relay: Relay) -> None:
    async with S3Files(BUCKET, endpoint=relay.endpoint, limits={"image": 10}, **KEYS) as storage:
        with pytest.raises(FileTooLarge):
            await storage.store(JPEG)
    assert relay.requests == []


async def test_it_opens_itself_and_closes_twice(relay: Relay) -> None:
    storage = S3Files(BUCKET, endpoint=relay.endpoint, prefix=fresh_prefix(), **KEYS)
    await asyncio.gather(*(storage.store(JPEG) for _ in range(4)))
    await storage.close()
    await storage.close()
    await storage.store(JPEG)
    await storage.close()


# -- links -------------------------------------------------------------------------------------


async def test_the_server_checks_the_signature(storage: S3Files) -> None:
    stored = await storage.store(JPEG)
    link = await storage.link(stored.key)
    mark = "X-Amz-Signature="
    at = link.index(mark) + len(mark)
    forged = link[:at] + ("1" if link[at] == "0" else "0") + link[at + 1 :]
    other = await storage.store(PDF)
    moved = link.replace(stored.key, other.key)
    for wrong in (forged, moved, link.partition("?")[0]):
        assert (await fetch(wrong))[0] == 403
    assert (await fetch(link, "DELETE"))[0] == 403
    assert (await fetch(link))[0] == 200


async def test_a_link_expires(relay: Relay) -> None:
    async with S3Files(BUCKET, endpoint=relay.endpoint, expires="1s", prefix=fresh_prefix(), **KEYS) as storage:
        stored = await storage.store(JPEG)
        link = await storage.link(stored.key)
    deadline = time.monotonic() + 60  # by the server's clock, which no test holds
    while (await fetch(link))[0] == 200 and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    assert (await fetch(link))[0] == 403


async def test_a_link_lasts_as_long_as_was_said(storage: S3Files, relay: Relay) -> None:
    stored = await storage.store(JPEG)
    assert parse_qs(urlsplit(await storage.link(stored.key)).query)["X-Amz-Expires"] == ["86400"]
    for wrong in ("8d", "0s", "-1s", "soon"):
        with pytest.raises(ConfigError):
            S3Files(BUCKET, endpoint=relay.endpoint, expires=wrong, **KEYS)
    S3Files(BUCKET, endpoint=relay.endpoint, expires="7d", **KEYS)


async def test_no_link_leads_out_of_the_prefix(storage: S3Files, s3: S3Server) -> None:
    stored = await storage.store(JPEG)
    client = s3.client()
    client.put_object(Bucket=BUCKET, Key="payroll.pdf", Body=b"secret")
    client.close()
    prefix, _, name = stored.key.rpartition("/")
    hostile = [
        "payroll.pdf",
        f"{prefix}/../payroll.pdf",
        f"{prefix}/{name}/../../payroll.pdf",
        f"{prefix}/payroll.pdf",
        f"/{stored.key}",
        f"other/{name}",
        name,
        f"{stored.key}\n",
        f"{stored.key}?versionId=1",
        f"{prefix}/{name.upper()}",
        prefix + "/",
        "",
    ]
    for key in hostile:
        with pytest.raises(StorageFailed) as refused:
            await storage.link(key)
        assert not refused.value.transient
        assert "payroll" not in str(refused.value)


async def test_the_name_of_a_download_cannot_break_out(storage: S3Files) -> None:
    stored = await storage.store(PDF)
    link = await storage.link(stored.key, filename='Fatura "março"\r\nSet-Cookie: a=b.pdf')
    status, _, headers = await fetch(link)
    assert status == 200
    assert "set-cookie" not in headers
    assert "mar%C3%A7o" in headers["content-disposition"]
    assert headers["content-disposition"].count('"') == 2


async def test_links_are_signed_for_where_whatsapp_reaches_the_storage(relay: Relay, s3: S3Server) -> None:
    """We upload over one address (inside), WhatsApp fetches over the other (outside)."""
    prefix = fresh_prefix()
    async with S3Files(BUCKET, endpoint=s3.endpoint, public_endpoint=relay.endpoint, prefix=prefix, **KEYS) as storage:
        stored = await storage.store(JPEG)
        assert relay.requests == []
        link = await storage.link(stored.key)
    assert link.startswith(relay.endpoint)
    assert (await fetch(link))[1] == JPEG


async def test_an_open_bucket_has_plain_links(relay: Relay) -> None:
    async with S3Files(
        BUCKET, endpoint=relay.endpoint, public_url="https://pub-1.r2.dev/", prefix=fresh_prefix(), **KEYS
    ) as storage:
        stored = await storage.store(JPEG)
        assert await storage.link(stored.key) == f"https://pub-1.r2.dev/{stored.key}"
        with pytest.raises(StorageFailed):
            await storage.link("payroll.pdf")


# -- what goes wrong ---------------------------------------------------------------------------


async def failure(storage: S3Files) -> StorageFailed:
    try:
        with pytest.raises(StorageFailed) as failed:
            await storage.store(JPEG)
        shown = "".join(traceback.format_exception(failed.value)) + repr(storage) + failed.value.hint
        assert SECRET_KEY not in shown
        assert ACCESS_KEY not in shown
        return failed.value
    finally:
        await storage.close()


async def test_a_wrong_secret_is_permanent(s3: S3Server) -> None:
    keys = KEYS | {"secret_key": "wrong"}
    failed = await failure(S3Files(BUCKET, endpoint=s3.endpoint, prefix=fresh_prefix(), **keys))
    assert (failed.transient, failed.code) == (False, "storage_failed")
    assert "secret key" in str(failed)


async def test_an_unknown_access_key_is_permanent(s3: S3Server) -> None:
    keys = KEYS | {"access_key": "unknown"}
    failed = await failure(S3Files(BUCKET, endpoint=s3.endpoint, prefix=fresh_prefix(), **keys))
    assert not failed.transient
    assert "access key is not known" in str(failed)


async def test_a_missing_bucket_is_permanent(s3: S3Server) -> None:
    failed = await failure(S3Files("no-such-bucket", endpoint=s3.endpoint, **KEYS))
    assert not failed.transient
    assert 'bucket "no-such-bucket"' in str(failed)
    assert "no such bucket" in str(failed)


async def test_a_server_that_is_down_is_transient() -> None:
    with socket.socket() as nobody:  # taken, and not listening
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        failed = await failure(S3Files(BUCKET, endpoint=endpoint, **KEYS))
    assert failed.transient
    assert "127.0.0.1" in str(failed)


async def test_a_server_that_stops_is_transient() -> None:
    with S3Server() as server:
        storage = S3Files(BUCKET, endpoint=server.endpoint, **KEYS)
        await storage.store(PDF)
        server.stop()
        assert (await failure(storage)).transient


async def answering(status: str, asked: list[str]) -> asyncio.Server:
    """A server that gives one answer to everything: for what SeaweedFS never says."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.split()[0].decode() + (" if" if b"if-none-match" in head.lower() else ""))
        said = "404 Not Found" if head.startswith(b"HEAD") else status
        said = "200 OK" if head.startswith(b"PUT") and b"if-none-match" not in head.lower() else said
        writer.write(f"HTTP/1.1 {said}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


@pytest.mark.parametrize("status", ["501 Not Implemented", "409 Conflict"])
async def test_a_server_without_conditions_gets_a_plain_upload(status: str) -> None:
    asked: list[str] = []
    server = await answering(status, asked)
    endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, S3Files(BUCKET, endpoint=endpoint, **KEYS) as storage:
        await storage.store(JPEG)
    assert (asked[0], asked[1], asked[-1]) == ("HEAD", "PUT if", "PUT")


async def test_an_overloaded_server_is_asked_again_and_then_transient() -> None:
    asked: list[str] = []
    server = await answering("503 Service Unavailable", asked)
    endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        assert (await failure(S3Files(BUCKET, endpoint=endpoint, **KEYS))).transient
    assert asked.count("PUT if") == 3


# -- settings ----------------------------------------------------------------------------------


async def test_without_boto3_the_extra_is_named(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    storage = S3Files(BUCKET, endpoint=s3.endpoint, **KEYS)
    with pytest.raises(ConfigError) as missing:
        await storage.open()
    assert "oncehook[s3]" in missing.value.hint


def test_nothing_shows_the_keys() -> None:
    storage = S3Files(BUCKET, endpoint="https://s3.example", **KEYS)
    shown = f"{storage!r} {storage!s} {vars(storage)}"
    assert SECRET_KEY not in shown
    assert ACCESS_KEY not in shown


@pytest.mark.parametrize(
    "wrong",
    [
        {"bucket": ""},
        {"bucket": "a/b"},
        {"bucket": "a?b"},
        {"prefix": "../"},
        {"prefix": "/"},
        {"prefix": "no-slash"},
        {"endpoint": "s3.example"},
        {"endpoint": "ftp://s3.example"},
        {"endpoint": "https://ana:hunter2@s3.example"},
        {"public_url": "files.example"},
        {"endpoint": None},
        {"access_key": ""},
        {"secret_key": ""},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    good: dict[str, Any] = {"bucket": BUCKET, "endpoint": "https://s3.example", **KEYS}
    with pytest.raises(ConfigError) as refused:
        S3Files(**good | wrong)
    assert "hunter2" not in str(refused.value)


async def test_aws_needs_only_a_region() -> None:
    async with S3Files(BUCKET, region="eu-west-1", **KEYS) as storage:
        link = await storage.link(f"oncehook/{'0' * 64}.jpg")
    assert urlsplit(link).hostname == f"{BUCKET}.s3.eu-west-1.amazonaws.com"


async def test_keys_may_be_references(s3: S3Server) -> None:
    env = {"THE_KEY": ACCESS_KEY, "THE_SECRET": SECRET_KEY}
    keys = {"access_key": Secret.from_env("THE_KEY", env=env), "secret_key": Secret.from_env("THE_SECRET", env=env)}
    async with S3Files(BUCKET, endpoint=s3.endpoint, prefix=fresh_prefix(), **keys) as storage:
        await storage.store(JPEG)
    env.clear()
    with pytest.raises(ConfigError, match="THE_KEY"):
        await S3Files(BUCKET, endpoint=s3.endpoint, **keys).open()


OURS = {"ONCEHOOK_S3_BUCKET": BUCKET, "ONCEHOOK_S3_ACCESS_KEY": ACCESS_KEY, "ONCEHOOK_S3_SECRET_KEY": SECRET_KEY}
R2 = {"R2_ACCOUNT_ID": "abc", "R2_ACCESS_KEY_ID": "r2-key", "R2_SECRET_ACCESS_KEY": "r2-secret"}
AWS = {"AWS_ACCESS_KEY_ID": "aws-key", "AWS_SECRET_ACCESS_KEY": "aws-secret", "AWS_REGION": "sa-east-1"}


async def linked(env: dict[str, str]) -> tuple[str, str]:
    """Where links lead and whose key signs them."""
    async with S3Files.from_env(env) as storage:
        link = urlsplit(await storage.link(f"{env.get('ONCEHOOK_S3_PREFIX', 'oncehook/')}{'0' * 64}"))
    return f"{link.scheme}://{link.netloc}", parse_qs(link.query)["X-Amz-Credential"][0].partition("/")[0]


async def test_the_environment_of_a_real_server(s3: S3Server) -> None:
    env = OURS | {"ONCEHOOK_S3_ENDPOINT": s3.endpoint, "ONCEHOOK_S3_PREFIX": fresh_prefix()}
    async with S3Files.from_env(env) as storage:
        stored = await storage.store(JPEG)
        assert stored.key.startswith(env["ONCEHOOK_S3_PREFIX"])
        assert (await fetch(await storage.link(stored.key)))[1] == JPEG
    assert SECRET_KEY not in repr(vars(storage))


@pytest.mark.parametrize(
    ("env", "where", "who"),
    [
        (OURS | {"ONCEHOOK_S3_REGION": "eu-west-1"}, f"https://{BUCKET}.s3.eu-west-1.amazonaws.com", ACCESS_KEY),
        (OURS | AWS | {"ONCEHOOK_S3_ENDPOINT": "http://minio:9000"}, "http://minio:9000", ACCESS_KEY),
        (R2 | {"R2_BUCKET": "media"}, "https://abc.r2.cloudflarestorage.com", "r2-key"),
        (R2 | {"R2_BUCKET_NAME": "media", "R2_ENDPOINT": "https://x.example"}, "https://x.example", "r2-key"),
        (R2 | {"ONCEHOOK_S3_BUCKET": "media"}, "https://abc.r2.cloudflarestorage.com", "r2-key"),
        (R2 | AWS | {"R2_BUCKET": "media"}, "https://abc.r2.cloudflarestorage.com", "r2-key"),
        (R2 | AWS | {"AWS_S3_BUCKET": "media"}, "https://media.s3.sa-east-1.amazonaws.com", "aws-key"),
        (AWS | {"ONCEHOOK_S3_BUCKET": "media"}, "https://media.s3.sa-east-1.amazonaws.com", "aws-key"),
        (AWS | {"BACKUP_S3_BUCKET": "media"}, "https://media.s3.sa-east-1.amazonaws.com", "aws-key"),
        (
            AWS | {"AWS_S3_BUCKET": "media", "BACKUP_S3_BUCKET": "x"},
            "https://media.s3.sa-east-1.amazonaws.com",
            "aws-key",
        ),
        (R2 | {"BACKUP_S3_BUCKET": "media"}, "https://abc.r2.cloudflarestorage.com", "r2-key"),
        (
            OURS | {"ONCEHOOK_S3_ENDPOINT": "http://minio:9000", "ONCEHOOK_S3_PUBLIC_ENDPOINT": "https://s3.example"},
            "https://s3.example",
            ACCESS_KEY,
        ),
    ],
)
async def test_the_environment_as_people_have_it(env: dict[str, str], where: str, who: str) -> None:
    assert await linked(env) == (where, who)


@pytest.mark.parametrize(
    ("env", "hint"),
    [
        ({}, "ONCEHOOK_S3_BUCKET"),
        ({"ONCEHOOK_S3_BUCKET": ""}, "ONCEHOOK_S3_BUCKET"),
        ({"ONCEHOOK_S3_BUCKET": BUCKET}, "ONCEHOOK_S3_ACCESS_KEY"),
        ({"BACKUP_S3_BUCKET": BUCKET}, "ONCEHOOK_S3_ACCESS_KEY"),
        (
            {"ONCEHOOK_S3_BUCKET": BUCKET, "R2_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"},
            "ONCEHOOK_S3_SECRET_KEY",
        ),
    ],
)
def test_an_environment_that_says_too_little(env: dict[str, str], hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        S3Files.from_env(env)
    assert hint in refused.value.hint


async def test_the_machines_own_settings_for_aws_do_not_interfere(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of another account")
    monkeypatch.setenv("AWS_PROFILE", "not-there")
    (tmp_path / "config").write_text(
        "[default]\ns3 =\n  addressing_style = virtual\n  use_accelerate_endpoint = true\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    async with S3Files(BUCKET, endpoint=s3.endpoint, prefix=fresh_prefix(), **KEYS) as storage:
        await storage.store(JPEG)
    async with S3Files(BUCKET, region="eu-west-1", **KEYS) as storage:
        assert "s3.eu-west-1.amazonaws.com" in await storage.link(f"oncehook/{'0' * 64}")


def test_the_page_about_it_runs(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[2] / "docs/how-to/whatsapp-files.md"
    for name, value in OURS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ONCEHOOK_S3_ENDPOINT", s3.endpoint)
    monkeypatch.setenv("ONCEHOOK_S3_PREFIX", fresh_prefix())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fatura.pdf").write_bytes(PDF)
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, page.name, "exec"), {})
    kind, mime, size, link = capsys.readouterr().out.split()
    assert (kind, mime, int(size)) == ("document", "application/pdf", len(PDF))
    assert fetched(link)[1] == PDF
