"""Files to be sent: a path or bytes become an `OutgoingFile`, or raise a `FileRefused` with a hint.

A file's type follows from its content, and from its name only where the content is ambiguous. The API's own table
(`FileTypes`) says as what it may be sent. Senders prepare a file before it is uploaded. The table of magic numbers is
ours: libraries (puremagic, filetype) know hundreds of types, but not the differences that matter to WhatsApp: Opus or
Vorbis, video or only sound in an mp4, an animated or a still webp.
"""

from __future__ import annotations

import errno
import mimetypes
import os
import re
import stat
import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final, Literal
from urllib.parse import urlsplit

from oncehook.errors import ConfigError, OncehookError
from oncehook.http_client.addresses import Guard
from oncehook.http_client.urls import read_url
from oncehook.human import show_size
from oncehook.whatsapp.messages import MediaKind

_LOOPBACK: Final = "127.0.0.1"


def find_link_fault(link: str, guard: Guard) -> str | None:
    """Return why this link may not be fetched, as the end of a sentence; None when it may."""
    try:
        host = urlsplit(read_url(link.partition("#")[0])).hostname or ""
    except ConfigError:
        return "is no plain web address"
    address = _address(host)
    what = None if address is None else guard.refuses(address)
    return None if what is None else f"leads to no public address ({what})"


def _address(host: str) -> str | None:
    """Return a host's IP address in any spelling; None for names."""
    name = host.rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):  # resolves to the machine that looks it up (RFC 6761)
        return _LOOPBACK
    return name if ":" in name or name.rpartition(".")[2].isdigit() else None


SizeKind = MediaKind | Literal["animated sticker"]

LIMITS: Final[Mapping[SizeKind, int]] = {
    "image": 5 << 20,
    "video": 16 << 20,
    "audio": 16 << 20,
    "document": 100 << 20,
    "sticker": 100 << 10,
    "animated sticker": 500 << 10,
}
"""Largest file in bytes that Meta takes. Its MB and KB are read as MiB and KiB, so that nothing it takes is refused."""

UNKNOWN: Final = "application/octet-stream"
OPUS: Final = "audio/ogg; codecs=opus"

WEBP: Final = "image/webp"

FileTypes = Mapping[MediaKind, Collection[str]]
"""The media types that an API takes as each kind. Any type may be a document."""

META_TYPES: Final[FileTypes] = {
    "image": ("image/jpeg", "image/png"),
    "video": ("video/mp4", "video/3gpp"),
    "audio": ("audio/aac", "audio/amr", "audio/mpeg", "audio/mp4", OPUS),
    "sticker": (WEBP,),
}
"""Media types that Meta takes. It converts nothing, so these are what WhatsApp itself shows."""

CONVERTED_AUDIO: Final = (
    *META_TYPES["audio"],
    *("audio/amr-wb", "audio/ogg", "audio/wav", "audio/flac", "audio/3gpp", "video/webm"),
)
"""Sounds that an API with ffmpeg converts to a voice message. A browser's recordings are WebM, whatever they hold."""

_FAMILIES: Final[Mapping[str, MediaKind]] = {"image": "image", "video": "video", "audio": "audio"}
_LONGEST_NAME: Final = 200
_HEAD: Final = 4096
_TAIL: Final = 1 << 16


class FileRefused(OncehookError):
    """This file cannot be sent."""

    code = "file_refused"


class FileUnreadable(FileRefused):
    """There is no such file, or it cannot be read."""

    code = "file_unreadable"


class FileUnsupported(FileRefused):
    """The API does not take this file as what it was to be sent as."""

    code = "file_unsupported"
    hint = 'Convert it, or send it as a document: kind="document".'


class FileTooLarge(FileRefused):
    """WhatsApp does not take a file of this size."""

    code = "file_too_large"

    def __init__(self, kind: SizeKind, size: int, limit: int) -> None:
        hint = 'Make it smaller, or send it as a document: kind="document".'
        if kind == "document":
            hint = "Put it where it can be downloaded, and send the address as text."
        allowed = f"{_article(kind).capitalize()} may have {show_size(limit)} ({limit:,} bytes)"
        super().__init__(f"{allowed}; this file has {size:,}.", hint=hint)
        self.kind = kind
        self.size = size
        self.limit = limit


@dataclass(slots=True, frozen=True)
class OutgoingFile:
    """A file that the API would take."""

    data: bytes = field(repr=False)
    kind: MediaKind
    mime: str
    filename: str
    """The name that the recipient sees: no folders, nothing unprintable, not too long."""


@dataclass(slots=True, frozen=True)
class StoredFile:
    """A file in the storage, under `key`."""

    key: str
    kind: MediaKind
    mime: str
    filename: str | None
    size: int = 0


def prepare(
    path_or_bytes: str | os.PathLike[str] | bytes,
    *,
    filename: str | None = None,
    kind: MediaKind | None = None,
    types: FileTypes = META_TYPES,
    limits: Mapping[SizeKind, int] = LIMITS,
) -> OutgoingFile:
    """Read a file, determine its type, and check that the API takes it. Raises FileRefused.

    Without `kind` the type decides. An image, video or sound that the API does not take as such is refused, unless
    `kind` is "document".
    """
    limits = {**LIMITS, **limits}
    if isinstance(path_or_bytes, bytes):
        data = path_or_bytes
    else:
        most = max(limit for name, limit in limits.items() if kind is None or name.endswith(kind))
        data = read(path_or_bytes, kind or "document", most=most)
        filename = filename or os.fspath(path_or_bytes)
    if not data:
        raise FileUnsupported("The file is empty.", hint="Look at what was to write it.")
    mime = detect(data, filename)
    chosen = _choose_kind(mime, filename, types) if kind is None else _check_kind(kind, mime, types)
    check_size(chosen, len(data), animated=is_animated(data), limits=limits)
    return OutgoingFile(data, chosen, mime, clean_name(filename, mime))


def kind_of(mime: str, types: FileTypes = META_TYPES) -> MediaKind:
    """Return what a file of this type is sent as. Raises FileUnsupported for media that the API does not take."""
    kind = "sticker" if mime == WEBP else _FAMILIES.get(mime.partition("/")[0], "document")
    if kind != "document" and mime not in types[kind]:
        raise FileUnsupported(f"This API takes no {mime}{_list_types(kind, types)}.")
    return kind


def check_size(kind: MediaKind, size: int, *, animated: bool = False, limits: Mapping[SizeKind, int] = LIMITS) -> None:
    name: SizeKind = "animated sticker" if kind == "sticker" and animated else kind
    limit = limits.get(name, LIMITS[name])
    if size > limit:
        raise FileTooLarge(name, size, limit)


def _choose_kind(mime: str, filename: str | None, types: FileTypes) -> MediaKind:
    kind = kind_of(mime, types)
    named = _guess_type(filename)
    if kind == "document" and named.partition("/")[0] in _FAMILIES:
        # a broken download or a disguised file, which must not reach a customer
        raise FileUnsupported(f"The file is named like {named}, and is {mime}.")
    return kind


def _check_kind(kind: MediaKind, mime: str, types: FileTypes) -> MediaKind:
    if kind != "document" and mime not in types[kind]:
        taken = _list_types(kind, types)
        raise FileUnsupported(f"The file is {mime}, which this API does not take as {_article(kind)}{taken}.")
    return kind


def _list_types(kind: MediaKind, types: FileTypes) -> str:
    return f"; it takes {', '.join(types[kind])}"


def _article(kind: SizeKind) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


# -- what it is --------------------------------------------------------------------------------

_MARKS: Final[tuple[tuple[bytes, str], ...]] = (
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
    (b"8BPS", "image/vnd.adobe.photoshop"),
    (b"#!AMR\n", "audio/amr"),
    (b"#!AMR-WB\n", "audio/amr-wb"),
    (b"fLaC", "audio/flac"),
    (b"FLV\x01", "video/x-flv"),
    (b"\0\0\x01\xba", "video/mpeg"),
    (b"\0\0\x01\xb3", "video/mpeg"),
    (b"%PDF-", "application/pdf"),
    (b"{\\rtf", "application/rtf"),
    (b"7z\xbc\xaf\x27\x1c", "application/x-7z-compressed"),
    (b"Rar!\x1a\x07", "application/vnd.rar"),
    (b"\x1f\x8b", "application/gzip"),
    (b"\xfd7zXZ\0", "application/x-xz"),
    (b"\x7fELF", "application/x-executable"),
    (b"MZ", "application/vnd.microsoft.portable-executable"),
)
_RIFF: Final = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}
_WORD: Final = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
_EXCEL: Final = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"
_POWERPOINT: Final = "application/vnd.openxmlformats-officedocument.presentationml.presentation"
_ZIPPED: Final = {
    b"word/": _WORD,
    b"xl/": _EXCEL,
    b"ppt/": _POWERPOINT,
    b"AndroidManifest.xml": "application/vnd.android.package-archive",
}
# a name in the central directory of a zip
_ZIPPED_NAME: Final = re.compile(rb"PK\x01\x02.{42}(word/|xl/|ppt/|AndroidManifest\.xml)", re.DOTALL)
_DECLARED: Final = re.compile(rb"application/(?:vnd\.oasis\.opendocument\.[a-z-]{1,40}|epub\+zip)")
_COMPOUND: Final = {
    "WordDocument": "application/msword",
    "Workbook": "application/vnd.ms-excel",
    "PowerPoint Document": "application/vnd.ms-powerpoint",
}
_BRANDS: Final = {
    b"M4A ": "audio/mp4",
    b"M4B ": "audio/mp4",
    b"M4P ": "audio/mp4",
    b"qt  ": "video/quicktime",
    b"avif": "image/avif",
    b"avis": "image/avif",
    b"crx ": "image/x-canon-cr3",
} | dict.fromkeys((b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"), "image/heic")
_HANDLER: Final = re.compile(rb"hdlr.{8}(vide|soun)", re.DOTALL)
_HTML: Final = re.compile(rb"\s*<(?:!doctype\s+html|html|head|body)[\s>]", re.IGNORECASE)
_BINARY: Final = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]")


def detect(data: bytes, filename: str | None = None) -> str:
    """Return the media type by content, and by name where the content is ambiguous.

    A type with a magic number is never taken from the name: a .jpg that does not begin like one is no JPEG.
    """
    found = _detect_content(data)
    if found:
        return found
    named = _guess_type(filename)
    if _is_text(data):
        return named if named in _WRITTEN or named.startswith("text/") else "text/plain"
    return UNKNOWN if named in _MARKED or named in _WRITTEN or named.startswith("text/") else named


def is_animated(data: bytes) -> bool:
    """Return whether this is an animated webp."""
    return data[:4] == b"RIFF" and data[8:16] == b"WEBPVP8X" and bool(data[20:21] and data[20] & 2)


def _detect_content(data: bytes) -> str | None:
    for mark, mime in _MARKS:
        if data.startswith(mark):
            return mime
    if data[:4] == b"RIFF":
        return _RIFF.get(data[8:12])
    if data[4:8] == b"ftyp":
        return _detect_mp4(data)
    if data[:4] == b"OggS":
        return _ogg(data[:_HEAD])
    if data[:4] == b"\x1aE\xdf\xa3":
        return "video/webm" if b"webm" in data[:64] else "video/x-matroska"
    if data[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _detect_zip(data)
    if data[:8] == b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1":
        return next((mime for name, mime in _COMPOUND.items() if name.encode("utf-16-le") in data), "application/x-cfb")
    if data[:2] == b"BM" and int.from_bytes(data[2:6], "little") == len(data):
        return "image/bmp"
    return _detect_mpeg_sound(data) or ("text/html" if _HTML.match(data[:_HEAD]) else None)


def _detect_mpeg_sound(data: bytes) -> str | None:
    """Detect MP3 and AAC: both begin with eleven set bits, possibly after an ID3 tag."""
    at = 0
    if data[:3] == b"ID3" and len(data) >= 10:
        at = 10 + sum((byte & 0x7F) << shift for byte, shift in zip(data[6:10], (21, 14, 7, 0), strict=True))
    frame = data[at : at + 3]
    if len(frame) == 3 and frame[0] == 0xFF:
        if frame[1] & 0xF6 == 0xF0:
            return "audio/aac"
        # layer III with a valid version, bit rate and sample rate
        if frame[1] & 0xE6 == 0xE2 and frame[1] & 0x18 != 0x08 and frame[2] >> 4 != 15 and frame[2] & 0x0C != 0x0C:
            return "audio/mpeg"
    return "audio/mpeg" if at else None


def _ogg(head: bytes) -> str:
    if b"\x80theora" in head:
        return "video/ogg"
    return OPUS if b"OpusHead" in head else "audio/ogg"


def _detect_mp4(data: bytes) -> str:
    """Return the type of an mp4 by its brand; for a general brand, by its tracks."""
    brand = data[8:12]
    if brand in _BRANDS:
        return _BRANDS[brand]
    only_sound = set(_HANDLER.findall(_box(data, b"moov"))) == {b"soun"}
    if brand[:2] == b"3g":
        return "audio/3gpp" if only_sound else "video/3gpp"
    return "audio/mp4" if only_sound else "video/mp4"


def _box(data: bytes, wanted: bytes) -> bytes:
    """Return the first box of this name at the top level of an mp4, or nothing."""
    at = 0
    for _ in range(1000):  # a fragmented film has many boxes, and this one before them
        size, name = int.from_bytes(data[at : at + 4]), data[at + 4 : at + 8]
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16])
        if name == wanted:
            return data[at : at + size] if size else data[at:]
        if size < 8:
            break
        at += size
    return b""


def _detect_zip(data: bytes) -> str:
    if data[30:38] == b"mimetype" and (declared := _DECLARED.match(data, 38)):
        return declared[0].decode()
    name = _ZIPPED_NAME.search(data, max(0, len(data) - _TAIL))
    return _ZIPPED[name[1]] if name else "application/zip"


def _is_text(data: bytes) -> bool:
    """Return whether it begins like text in an ASCII-compatible encoding, or in UTF-16 with a byte order mark."""
    coding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin-1"
    return not _BINARY.search(data[:_HEAD].decode(coding, "ignore"))


# -- what it is called -------------------------------------------------------------------------

_EXTENSIONS: Final[dict[str, str]] = {
    "image/jpeg": ".jpg",
    "image/png": ".png",
    "image/webp": ".webp",
    "image/gif": ".gif",
    "image/heic": ".heic",
    "image/avif": ".avif",
    "image/tiff": ".tif",
    "image/bmp": ".bmp",
    "image/svg+xml": ".svg",
    "video/mp4": ".mp4",
    "video/3gpp": ".3gp",
    "video/quicktime": ".mov",
    "video/webm": ".webm",
    "video/x-matroska": ".mkv",
    "video/x-msvideo": ".avi",
    "video/mpeg": ".mpg",
    "audio/aac": ".aac",
    "audio/amr": ".amr",
    "audio/mpeg": ".mp3",
    "audio/mp4": ".m4a",
    OPUS: ".ogg",
    "audio/ogg": ".oga",
    "audio/wav": ".wav",
    "audio/flac": ".flac",
    "application/pdf": ".pdf",
    "application/rtf": ".rtf",
    "application/msword": ".doc",
    "application/vnd.ms-excel": ".xls",
    "application/vnd.ms-powerpoint": ".ppt",
    _WORD: ".docx",
    _EXCEL: ".xlsx",
    _POWERPOINT: ".pptx",
    "application/vnd.oasis.opendocument.text": ".odt",
    "application/vnd.oasis.opendocument.spreadsheet": ".ods",
    "application/vnd.oasis.opendocument.presentation": ".odp",
    "application/epub+zip": ".epub",
    "application/vnd.android.package-archive": ".apk",
    "application/zip": ".zip",
    "application/gzip": ".gz",
    "application/x-7z-compressed": ".7z",
    "application/vnd.rar": ".rar",
    "application/vnd.microsoft.portable-executable": ".exe",
    "application/json": ".json",
    "application/xml": ".xml",
    "text/plain": ".txt",
    "text/csv": ".csv",
    "text/html": ".html",
    "text/markdown": ".md",
    "text/calendar": ".ics",
    "text/vcard": ".vcf",
    UNKNOWN: ".bin",
}
_BY_EXTENSION: Final = {extension: mime for mime, extension in _EXTENSIONS.items()} | {".jpeg": "image/jpeg"}
_WRITTEN: Final = {"application/json", "application/xml", "image/svg+xml"}
"""Text types outside `text/`."""
_MARKED: Final = (
    {mime for mime in _EXTENSIONS if not mime.startswith("text/")} - _WRITTEN
    | {mime for _, mime in _MARKS}
    | {*_RIFF.values(), *_BRANDS.values()}
)

# Python's own table: the machine's could give the same file another type elsewhere
_TABLE: Final = mimetypes.MimeTypes(filenames=())


def extension_of(mime: str) -> str:
    """Return the extension of a type, with its dot; one of a fixed list, or empty."""
    return _EXTENSIONS.get(mime, "")


def mime_of(extension: str) -> str:
    """Return the media type of an extension, or UNKNOWN."""
    return _BY_EXTENSION.get(extension, UNKNOWN)


def _guess_type(filename: str | None) -> str:
    extension = PurePosixPath((filename or "").replace("\\", "/")).suffix.lower()
    return _BY_EXTENSION.get(extension) or _TABLE.guess_type(f"file{extension}")[0] or UNKNOWN


def clean_name(filename: str | None, mime: str) -> str:
    """Return a name that is safe to show: no folders, nothing unprintable or reversing text, not too long."""
    last = re.split(r"[/\\]", filename or "")[-1]
    printable = "".join(" " if char.isspace() else char for char in last if not _is_hidden(char))
    name = " ".join(printable.split()).strip(". ") or "file"
    stem, suffix = PurePosixPath(name).stem, PurePosixPath(name).suffix
    if not suffix or len(suffix) > 16:
        stem, suffix = name, extension_of(mime)
    return stem[: _LONGEST_NAME - len(suffix)].rstrip(". ") + suffix


def _is_hidden(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cf", "Cs") and not char.isspace()


# -- reading it --------------------------------------------------------------------------------


def read(path: str | os.PathLike[str], kind: MediaKind = "document", *, most: int = LIMITS["document"]) -> bytes:
    """Read an ordinary file, following links. Raises FileUnreadable or FileTooLarge."""
    name = Path(path).name
    try:
        # opening a pipe without a writer would block for ever
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise FileUnreadable(f'"{name}" cannot be read: {_reason(error)}') from None
    try:
        return _read_open(handle, name, kind, most)
    except OSError as error:
        raise FileUnreadable(f'"{name}" cannot be read: {_reason(error)}') from None
    finally:
        os.close(handle)


def _read_open(handle: int, name: str, kind: MediaKind, most: int) -> bytes:
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        raise FileUnreadable(f'"{name}" is not an ordinary file.')
    if status.st_size > most:
        raise FileTooLarge(kind, status.st_size, most)
    with os.fdopen(handle, "rb", closefd=False) as file:
        data = file.read(most + 1)  # it may grow while it is read
    if len(data) > most:
        raise FileTooLarge(kind, len(data), most)
    return data


def _reason(error: Exception) -> str:
    return os.strerror(getattr(error, "errno", None) or errno.EINVAL)
