"""Messenger and Instagram (Meta): messages, receipts and page changes in one envelope, retried for 36 hours.

Instagram's own examples wrap the document in an array, and with Business Login put `field` and `value` straight into
the entry; both are taken. Reads and deliveries have no id: they say up to which moment everything was seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from oncehook.model import Arrival
from oncehook.presets import _meta
from oncehook.rules import RuleContext
from oncehook.sources import Odd, Preset, Sample

LISTS: Final = ("messaging", "standby", "changes")
# Every messaging item has these; what it has besides them is what happened.
ADDRESS: Final = frozenset({"sender", "recipient", "timestamp", "hop_context"})


def split(data: Any, arrival: Arrival) -> Iterator[Any]:
    """Yield each messaging item and each change; a document in an array keeps its array."""
    if not isinstance(data, list) or not data:
        yield from _documents(data)
        return
    for document in data:
        for part in _documents(document):
            yield _meta.wrap(part, lambda item: [item])


def _entry(entry: Any) -> Iterator[Any]:
    if not isinstance(entry, dict):
        yield Odd(entry)
        return
    parts = list(_meta.one_of(entry, LISTS))
    yield from parts
    if not parts:
        yield entry if "field" in entry else Odd(entry)


_documents: Final = _meta.each("entry", _entry)


class MessengerNotice(NamedTuple):
    """One item: its account, its kind, and the item itself."""

    account: str
    kind: str
    item: dict[str, Any]
    about: Any
    """The content of a messaging item; None for a change."""


def read(context: RuleContext) -> MessengerNotice:
    """Read the one item of an event. A missing field raises, which a rule treats as a missing value."""
    data = context.data
    entry = (data[0] if isinstance(data, list) else data)["entry"][0]
    for name in ("messaging", "standby"):
        if entry.get(name):
            # Standby: another app has this conversation, so it is not ours to answer.
            return _messaging(entry["id"], entry[name][0], "standby." if name == "standby" else "")
    change = entry["changes"][0] if entry.get("changes") else entry
    if "sender" in change["value"]:  # Business Login and the dashboard's test button send messages this way
        return _messaging(entry["id"], change["value"], "")
    return MessengerNotice(entry["id"], change["field"], change["value"], None)


def _messaging(account: str, item: dict[str, Any], prefix: str) -> MessengerNotice:
    names = [name for name in item if name not in ADDRESS]
    name = "message" if "message" in names else names[0]
    about = item[name]
    kind = prefix + name
    if name == "message" and about.get("is_echo"):
        kind += ".echo"
    elif name == "message" and about.get("is_deleted"):  # with the mid of the deleted message
        kind += ".deleted"
    return MessengerNotice(account, kind, item, about)


def key(context: RuleContext) -> tuple[Any, ...] | None:
    """Return a message's mid; for receipts, the person and the moment; otherwise person, kind and time. Changes have no
    key."""
    account, kind, item, about = read(context)
    if about is None:
        return None
    name, sender = kind.removeprefix("standby.").partition(".")[0], item["sender"]["id"]
    if name == "message":
        return (account, kind, about["mid"]) if about["mid"] else None
    if name in ("read", "delivery"):
        mark = about.get("watermark") or about["mid"]
        return (account, kind, sender, mark, *about.get("mids", ())) if mark else None
    when = item["timestamp"]
    return (account, kind, sender, about.get("mid"), when) if when else None


def subject(context: RuleContext) -> tuple[Any, ...]:
    """Return the account and the other person; for a change, the account and its post."""
    account, _, item, about = read(context)
    if about is not None:
        sender = item["sender"]["id"]
        return account, item["recipient"]["id"] if sender == account else sender  # an echo is our own message
    media = item.get("media")
    post = item.get("post_id") or item.get("media_id") or (media.get("id") if isinstance(media, dict) else None)
    return (account, post) if post else (account,)


def text(notice: MessengerNotice) -> str | None:
    """Return the text that a person wrote or pressed; for a comment, its text."""
    content = notice.item if notice.about is None else notice.about
    return content.get("text") or content.get("title")


# entry.time is the time of sending, which changes with every attempt, not the time of the event.
_ENVELOPE: Final = '{"object":"page","entry":[{"id":"108077611888514","time":{now_ms},"messaging":[%s]}]}'
_ITEM: Final = '{"sender":{"id":"7114203988"},"recipient":{"id":"108077611888514"},"timestamp":{now_ms},%s}'
_MESSAGE: Final = _ITEM % '"message":{"mid":"m_{id}%s","text":"Ol\\u00e1, ainda est\\u00e1 aberto?"}'
_POSTBACK: Final = _ITEM % '"postback":{"mid":"m_{id}P","title":"Get started","payload":"START"}'
_READ: Final = _ITEM % '"read":{"watermark":{now_ms}}'

PRESET = Preset(
    name="messenger",
    title="Messenger and Instagram",
    scheme=_meta.SIGNATURE,
    handshake=_meta.handshake,
    split=split,
    key=key,
    # Comments, feed and other changes: the same content is the same change.
    on_missing_key="body_hash",
    type=lambda context: read(context).kind,
    subject=subject,
    event_time=lambda context: read(context).item.get("timestamp") or read(context).item.get("created_time"),
    preview=lambda context: text(read(context)),
    volume=("message", "message.echo", "postback"),
    volatile=("$.entry[*].time", "$[*].entry[*].time"),
    horizon="36h",
    keep_keys="30d",
    max_body="4MiB",
    # Meta waits 20 s and tries again at once.
    budget="2s",
    needs=("secret", "verify_token"),
    facts={
        "scheme": "developers.facebook.com/docs/graph-api/webhooks/getting-started",
        "handshake": "developers.facebook.com/docs/graph-api/webhooks/getting-started",
        "split": "developers.facebook.com/documentation/instagram-platform/webhooks/examples",
        "key": "developers.facebook.com/documentation/instagram-platform/webhooks/examples (mid, read.watermark; "
        "delivery, postback, reaction and changes unverified)",
        "event_time": "developers.facebook.com/documentation/instagram-platform/webhooks/examples",
        "horizon": "developers.facebook.com/docs/graph-api/webhooks/getting-started (36 hours)",
        "budget": "developers.facebook.com/docs/messenger-platform/faq (20 s)",
        "max_body": "unverified (as WhatsApp)",
    },
    samples={
        "message": Sample(_ENVELOPE % (_MESSAGE % "")),
        "postback": Sample(_ENVELOPE % _POSTBACK),
        "read": Sample(_ENVELOPE % _READ),
        "comments": Sample(
            '[{"object":"instagram","entry":[{"id":"17841405309211844","time":{now},"field":"comments","value":'
            '{"id":"1{number}","from":{"id":"232323232","username":"ana.example"},"text":"Que lindo \\ud83d\\ude0d",'
            '"media":{"id":"17887498072083520","media_product_type":"FEED"}}}]}]'
        ),
        "batch": Sample(_ENVELOPE % ",".join([_MESSAGE % "A", _MESSAGE % "B", _POSTBACK, _READ])),
    },
)
