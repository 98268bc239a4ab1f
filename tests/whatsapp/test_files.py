"""What a file is, whether WhatsApp takes it, and what the recipient reads as its name."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from itertools import product
from pathlib import Path

import pytest

from oncehook.whatsapp import EvolutionApi, EvolutionGo, MetaCloud, Sender
from oncehook.whatsapp.files import (
    LIMITS,
    OPUS,
    FileRefused,
    FileTooLarge,
    FileUnreadable,
    FileUnsupported,
    SizeKind,
    check_size,
    clean_name,
    detect,
    extension_of,
    is_animated,
    kind_of,
    mime_of,
    prepare,
    read,
)
from oncehook.whatsapp.messages import MediaKind

JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00" + bytes(20)
PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(20)
PDF = b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n"
EXE = b"MZ\x90\x00\x03" + bytes(60)


def box(name: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I", 8 + len(content)) + name + content


def mp4(brand: bytes, *tracks: bytes, before: bytes = b"") -> bytes:
    handlers = [box(b"hdlr", bytes(8) + kind + bytes(13)) for kind in tracks]
    moov = box(b"moov", box(b"mvhd", bytes(100)) + b"".join(box(b"trak", box(b"mdia", one)) for one in handlers))
    return box(b"ftyp", brand + bytes(4) + b"isommp42") + before + moov


def ogg(first_packet: bytes) -> bytes:
    return b"OggS\x00\x02" + bytes(20) + b"\x01\x13" + first_packet + bytes(40)


def webp(chunk: bytes, flags: int = 0) -> bytes:
    body = b"WEBP" + chunk + struct.pack("<I", 10) + bytes([flags]) + bytes(9)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def zipped(*names: str, first: tuple[str, str] | None = None) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        if first:
            archive.writestr(*first)
        for name in names:
            archive.writestr(name, "x" * 2000)
    return written.getvalue()


def compound(stream: str) -> bytes:
    return b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504) + stream.encode("utf-16-le") + bytes(64)


MP3_FRAME = b"\xff\xfb\x90\x64" + bytes(20)
AAC_FRAME = b"\xff\xf1\x50\x80" + bytes(20)
ID3 = b"ID3\x04\x00\x00\x00\x00\x01\x00" + bytes(128)

WORD = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
EXCEL = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"
POWERPOINT = "application/vnd.openxmlformats-officedocument.presentationml.presentation"

SAMPLES: dict[str, tuple[bytes, str, MediaKind | None]] = {
    "jpeg": (JPEG, "image/jpeg", "image"),
    "png": (PNG, "image/png", "image"),
    "gif": (b"GIF89a" + bytes(10), "image/gif", None),
    "heic": (mp4(b"heic"), "image/heic", None),
    "avif": (mp4(b"avif"), "image/avif", None),
    "webp": (webp(b"VP8 "), "image/webp", "sticker"),
    "animated webp": (webp(b"VP8X", 0x12), "image/webp", "sticker"),
    "mp4": (mp4(b"isom", b"vide", b"soun"), "video/mp4", "video"),
    "mp4, index last": (mp4(b"mp42", b"soun", b"vide", before=box(b"mdat", bytes(5000))), "video/mp4", "video"),
    "mp4 without tracks": (mp4(b"avc1"), "video/mp4", "video"),
    "3gp": (mp4(b"3gp5", b"vide"), "video/3gpp", "video"),
    "mov": (mp4(b"qt  ", b"vide"), "video/quicktime", None),
    "webm": (b"\x1aE\xdf\xa3\x9fB\x86\x81\x01B\xf7\x81\x01B\xf2\x81\x04B\xf3\x81\x08B\x82\x84webm", "video/webm", None),
    "mkv": (b"\x1aE\xdf\xa3\x93B\x82\x88matroska", "video/x-matroska", None),
    "mpeg": (b"\x00\x00\x01\xba" + bytes(20), "video/mpeg", None),
    "tiff": (b"II*\x00" + bytes(20), "image/tiff", None),
    "3gp, only sound": (mp4(b"3gp5", b"soun"), "audio/3gpp", None),
    "avi": (b"RIFF\x00\x00\x00\x00AVI LIST", "video/x-msvideo", None),
    "m4a": (mp4(b"M4A ", b"soun"), "audio/mp4", "audio"),
    "m4a of a general brand": (mp4(b"mp42", b"soun"), "audio/mp4", "audio"),
    "m4a, index last": (mp4(b"isom", b"soun", before=box(b"mdat", b"hdlr12345678vide")), "audio/mp4", "audio"),
    "mp3": (MP3_FRAME, "audio/mpeg", "audio"),
    "mp3 with tags": (ID3 + MP3_FRAME, "audio/mpeg", "audio"),
    "aac": (AAC_FRAME, "audio/aac", "audio"),
    "aac with tags": (ID3 + AAC_FRAME, "audio/aac", "audio"),
    "amr": (b"#!AMR\n" + bytes(20), "audio/amr", "audio"),
    "amr wide": (b"#!AMR-WB\n" + bytes(20), "audio/amr-wb", None),
    "opus": (ogg(b"OpusHead\x01"), OPUS, "audio"),
    "vorbis": (ogg(b"\x01vorbis"), "audio/ogg", None),
    "theora": (ogg(b"\x80theora"), "video/ogg", None),
    "wav": (b"RIFF\x00\x00\x00\x00WAVEfmt ", "audio/wav", None),
    "flac": (b"fLaC" + bytes(20), "audio/flac", None),
    "pdf": (PDF, "application/pdf", "document"),
    "docx": (zipped("[Content_Types].xml", "_rels/.rels", "word/document.xml"), WORD, "document"),
    "xlsx": (zipped("[Content_Types].xml", "xl/workbook.xml"), EXCEL, "document"),
    "pptx": (zipped("[Content_Types].xml", "ppt/presentation.xml"), POWERPOINT, "document"),
    "odt": (
        zipped("content.xml", first=("mimetype", "application/vnd.oasis.opendocument.text")),
        "application/vnd.oasis.opendocument.text",
        "document",
    ),
    "zip": (zipped("photos/words.jpg"), "application/zip", "document"),
    "doc": (compound("WordDocument"), "application/msword", "document"),
    "xls": (compound("Workbook"), "application/vnd.ms-excel", "document"),
    "ppt": (compound("PowerPoint Document"), "application/vnd.ms-powerpoint", "document"),
    "exe": (EXE, "application/vnd.microsoft.portable-executable", "document"),
    "html": (b"\n<!DOCTYPE html><title>Not found</title>", "text/html", "document"),
    "text": ("Olá, tudo bem?\n".encode(), "text/plain", "document"),
    "text in latin-1": ("Olá, São Paulo\n".encode("latin-1"), "text/plain", "document"),
    "text in utf-16": ("Olá\n".encode("utf-16"), "text/plain", "document"),
    "noise": (bytes(range(256)), "application/octet-stream", "document"),
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_content_tells_what_it_is(sample: str) -> None:
    data, mime, kind = SAMPLES[sample]
    assert detect(data) == mime
    if kind is None:
        with pytest.raises(FileUnsupported, match="takes"):
            kind_of(mime)
    else:
        assert kind_of(mime) == kind


@pytest.mark.parametrize("name", ["x.jpg", "x.mp4", "x.mp3", "x.webp", "x.ogg", "x.docx"])
def test_no_name_changes_what_content_tells(name: str) -> None:
    for sample, (data, mime, _) in SAMPLES.items():
        assert (sample, detect(data, name)) == (sample, mime)


def test_a_file_cut_short_is_something_all_the_same() -> None:
    for length, (sample, (data, _, _)) in product(range(1, 40), SAMPLES.items()):
        assert "/" in detect(data[:length]), (sample, length)
        assert is_animated(data[:length]) in (True, False), (sample, length)


@pytest.mark.parametrize(
    ("data", "name", "mime"),
    [
        (b"a;b\n1;2\n", "report.csv", "text/csv"),
        ("preço;ção\n".encode("latin-1"), "REPORT.CSV", "text/csv"),
        (b'{"a": 1}', "data.json", "application/json"),
        (b"<svg/>", "logo.svg", "image/svg+xml"),
        (b"BEGIN:VCARD\n", "ana.vcf", "text/vcard"),
        (b"just words", "words.pdf", "text/plain"),
        (b"just words", None, "text/plain"),
        (bytes(range(256)), "drawing.csv", "application/octet-stream"),
        (bytes(range(256)), "model.wasm", "application/wasm"),
        (bytes(range(256)), "folder.mp3/blob", "application/octet-stream"),
    ],
)
def test_the_name_tells_what_content_cannot(data: bytes, name: str | None, mime: str) -> None:
    assert detect(data, name) == mime


def test_a_moving_webp_is_told_from_a_still_one() -> None:
    assert is_animated(webp(b"VP8X", 0x02))
    assert not is_animated(webp(b"VP8X", 0x10))
    assert not is_animated(webp(b"VP8 ", 0x02))


# -- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LIMITS)
def test_the_limit_itself_is_taken_and_a_byte_more_is_not(kind: SizeKind) -> None:
    media: MediaKind = "sticker" if kind == "animated sticker" else kind
    animated = kind == "animated sticker"
    check_size(media, LIMITS[kind], animated=animated)
    with pytest.raises(FileTooLarge) as refused:
        check_size(media, LIMITS[kind] + 1, animated=animated)
    assert (refused.value.kind, refused.value.size, refused.value.limit) == (kind, LIMITS[kind] + 1, LIMITS[kind])
    assert refused.value.code == "file_too_large"
    assert kind in str(refused.value)
    assert ("document" in refused.value.hint) == (kind != "document")


def test_the_limits_are_metas() -> None:
    said = {"image": "5MiB", "video": "16MiB", "audio": "16MiB", "document": "100MiB", "sticker": "100KiB"}
    for kind, limit in said.items():
        with pytest.raises(FileTooLarge, match=f"may have {limit}"):
            check_size(kind, 1 << 30)  # type: ignore[arg-type]
    with pytest.raises(FileTooLarge, match="An animated sticker may have 500KiB"):
        check_size("sticker", 1 << 30, animated=True)


def test_a_picture_too_large_becomes_a_document_only_when_asked() -> None:
    photo = JPEG + bytes(LIMITS["image"])
    with pytest.raises(FileTooLarge, match="An image may have 5MiB"):
        prepare(photo)
    assert prepare(photo, kind="document").kind == "document"


def test_a_still_sticker_has_the_smaller_limit() -> None:
    padding = bytes(200 << 10)
    assert prepare(webp(b"VP8X", 0x02) + padding).kind == "sticker"
    with pytest.raises(FileTooLarge, match="A sticker may have 100KiB"):
        prepare(webp(b"VP8X") + padding)


def test_other_limits_can_be_set_one_by_one(tmp_path: Path) -> None:
    assert prepare(JPEG + bytes(6 << 20), limits={"image": 7 << 20}).kind == "image"
    (tmp_path / "a.pdf").write_bytes(PDF + bytes(8 << 20))
    assert prepare(tmp_path / "a.pdf", limits={"image": 7 << 20}).kind == "document"
    with pytest.raises(FileTooLarge):
        prepare(PDF + bytes(10), limits={"document": 10})


# -- kinds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES)
def test_anything_can_be_a_document(sample: str) -> None:
    data, mime, _ = SAMPLES[sample]
    file = prepare(data, kind="document")
    assert (file.kind, file.mime, file.data) == ("document", mime, data)


@pytest.mark.parametrize("kind", ["image", "video", "audio", "sticker"])
def test_a_kind_that_is_asked_for_must_fit(kind: MediaKind) -> None:
    for sample, (data, _, fitting) in SAMPLES.items():
        if kind == fitting:
            assert prepare(data, kind=kind).kind == kind, sample
        else:
            with pytest.raises(FileUnsupported, match=f"as an? {kind}") as refused:
                prepare(data, kind=kind)
            assert 'kind="document"' in refused.value.hint, sample


TAKEN: dict[type[Sender], dict[str, set[str]]] = {
    # developers.facebook.com, Cloud API, supported media types
    MetaCloud: {
        "image": {"jpeg", "png"},
        "video": {"mp4", "3gp"},
        "audio": {"m4a", "mp3", "aac", "amr", "opus"},
        "sticker": {"webp"},
    },
    # prepareMediaMessage: sharp for pictures, films as they are, ffmpeg for sounds
    EvolutionApi: {
        "image": {"jpeg", "png", "gif", "webp", "tiff", "avif"},
        "video": {"mp4", "3gp", "mov", "avi", "webm", "mkv", "mpeg"},
        "audio": {"m4a", "mp3", "aac", "amr", "amr wide", "opus", "vorbis", "wav", "flac", "3gp, only sound", "webm"},
        "sticker": {"webp", "png", "jpeg", "gif", "tiff", "avif"},
    },
    # sendMediaUrlWithRetry names the types that it accepts; stickers are decoded as PNG or WebP; ffmpeg for sounds
    EvolutionGo: {
        "image": {"jpeg", "png", "webp"},
        "video": {"mp4"},
        "audio": {"m4a", "mp3", "aac", "amr", "amr wide", "opus", "vorbis", "wav", "flac", "3gp, only sound", "webm"},
        "sticker": {"webp", "png"},
    },
}


@pytest.mark.parametrize("sender", TAKEN)
@pytest.mark.parametrize("kind", ["image", "video", "audio", "sticker"])
def test_each_api_takes_its_own_files(sender: type[Sender], kind: MediaKind) -> None:
    for sample in set().union(*(set().union(*one.values()) for one in TAKEN.values())):
        data = SAMPLES[sample][0]
        if sample in TAKEN[sender][kind]:
            assert prepare(data, kind=kind, types=sender.file_types).kind == kind, sample
        else:
            with pytest.raises(FileUnsupported, match=f"as an? {kind}; it takes "):
                prepare(data, kind=kind, types=sender.file_types)


@pytest.mark.parametrize(
    ("sender", "kinds"),
    [
        (MetaCloud, {"gif": None, "mov": None, "avi": None, "wav": None, "webp": "sticker", "pdf": "document"}),
        (EvolutionApi, {"gif": "image", "mov": "video", "avi": "video", "wav": "audio", "webp": "sticker"}),
        (EvolutionGo, {"gif": None, "mov": None, "avi": None, "wav": "audio", "webm": None, "webp": "sticker"}),
    ],
)
def test_what_is_not_asked_for_is_sent_as_what_it_is(sender: type[Sender], kinds: dict[str, MediaKind | None]) -> None:
    for sample, kind in kinds.items():
        data = SAMPLES[sample][0]
        if kind is None:
            with pytest.raises(FileUnsupported, match="This API takes no"):
                prepare(data, types=sender.file_types)
        else:
            assert prepare(data, types=sender.file_types).kind == kind


@pytest.mark.parametrize("data", [EXE, b"<html>502 Bad Gateway</html>", bytes(range(256)), PDF])
def test_what_only_pretends_to_be_a_picture_is_not_sent_unasked(data: bytes) -> None:
    with pytest.raises(FileUnsupported, match="named like image/jpeg"):
        prepare(data, filename="photo.jpg")
    assert prepare(data, filename="photo.jpg", kind="document").mime == detect(data)


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(FileUnsupported, match="empty"):
        prepare(b"", kind="document")


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "cleaned"),
    [
        ("../../etc/passwd.txt", "passwd.txt"),
        ("C:\\Users\\ana\\Fatura março.pdf", "Fatura março.pdf"),
        ("a\r\nb\x00c\x1b[1m.pdf", "a bc[1m.pdf"),
        ("invoice\u202efdp.exe", "invoicefdp.exe"),
        ("bad\udcff.pdf", "bad.pdf"),
        ("  spaced \t out .pdf", "spaced out.pdf"),
        ("report", "report.pdf"),
        ("..", "file.pdf"),
        ("", "file.pdf"),
        (None, "file.pdf"),
        (".pdf", "pdf.pdf"),
        ("日本語.pdf", "日本語.pdf"),
    ],
)
def test_the_recipient_sees_a_clean_name(given: str | None, cleaned: str) -> None:
    assert clean_name(given, "application/pdf") == cleaned


def test_a_long_name_keeps_its_ending() -> None:
    name = clean_name("x" * 500 + ".pdf", "application/pdf")
    assert len(name) == 200
    assert name.endswith("x.pdf")
    assert len(clean_name("x." + "y" * 500, "application/pdf")) == 200


def test_endings_and_types_lead_to_each_other() -> None:
    for data, mime, _ in SAMPLES.values():
        if extension_of(mime):
            assert mime_of(extension_of(mime)) == detect(data)


# -- paths -------------------------------------------------------------------------------------


def test_a_path_is_read_and_its_last_part_is_the_name(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(JPEG)
    (tmp_path / "link").symlink_to("photo.jpg")
    for given in (tmp_path / "photo.jpg", str(tmp_path / "photo.jpg")):
        file = prepare(given)
        assert (file.data, file.kind, file.filename) == (JPEG, "image", "photo.jpg")
    assert prepare(tmp_path / "link").filename == "link.jpg"
    assert prepare(tmp_path / "link", filename="Holidays.jpg").filename == "Holidays.jpg"


def test_what_is_no_ordinary_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero"), tmp_path / "dangling", tmp_path / "none", "a\0b"):
        with pytest.raises(FileUnreadable) as refused:
            prepare(path)
        assert refused.value.code == "file_unreadable"
        assert str(tmp_path) + "/" not in str(refused.value)


def test_no_more_is_read_than_could_be_sent(tmp_path: Path) -> None:
    large = tmp_path / "film.mp4"
    with large.open("wb") as file:
        file.truncate(1 << 40)  # a hole: reading it would take for ever
    with pytest.raises(FileTooLarge) as refused:
        prepare(large)
    assert refused.value.limit == LIMITS["document"]
    with pytest.raises(FileTooLarge, match="An image may have 5MiB"):
        prepare(large, kind="image")


def test_a_file_that_grows_meanwhile_is_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"short")
    look = os.fstat

    def look_before_it_grows(handle: int) -> os.stat_result:
        status = look(handle)
        with path.open("ab") as log:
            log.write(bytes(100))
        return status

    monkeypatch.setattr(os, "fstat", look_before_it_grows)
    with pytest.raises(FileTooLarge):
        read(path, most=10)


def test_every_refusal_is_one_kind_of_error() -> None:
    assert issubclass(FileTooLarge, FileRefused)
    assert issubclass(FileUnsupported, FileRefused)
    assert issubclass(FileUnreadable, FileRefused)
