"""Slack Events API: signed with the time; waits three seconds for an answer, otherwise repeats at once.

The first request asks for a challenge back; it is signed like any other. Slash commands and buttons come as forms.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from oncehook import payload
from oncehook.model import Arrival
from oncehook.presets import _base
from oncehook.rules import RuleContext
from oncehook.sources import Preset, Reply, Sample, Source
from oncehook.verify import Hmac


def handshake(arrival: Arrival, source: Source) -> Reply | None:
    """Answer `{"type":"url_verification","challenge":…}` with the challenge. Its signature was checked before."""
    if b"url_verification" not in arrival.body or arrival.method != "POST":
        return None
    data = _base.read_body(arrival)
    # An ordinary event may contain the word in somebody's text.
    if not isinstance(data, dict) or data.get("type") != "url_verification":
        return None
    return Reply(200, msgspec.json.encode({"challenge": data.get("challenge")}))


def interaction(context: RuleContext) -> Any:
    """Parse the content of a button or a dialog: JSON in a form. Raises what a rule treats as missing."""
    return payload.parse((context.form("payload") or "").encode())


def kind(context: RuleContext) -> str | None:
    """Return `message.bot_message`, `app_mention`; `command./deploy`; `interaction.block_actions`."""
    data = context.data
    if isinstance(data, dict):
        event = data["event"] if isinstance(data.get("event"), dict) else data
        return ".".join(filter(None, (event["type"], event.get("subtype"))))
    command = context.form("command")
    return f"command.{command}" if command else f"interaction.{interaction(context)['type']}"


_EVENT: Final = (
    '{"token":"not-checked","team_id":"T0100042","api_app_id":"A0100042","event":%s,"type":"event_callback",'
    '"event_id":"Ev{id}","event_time":{now},"authorizations":[{"team_id":"T0100042","user_id":"U0100001","is_bot":true}]}'
)

PRESET = Preset(
    name="slack",
    title="Slack Events API",
    scheme=Hmac(
        header="X-Slack-Signature",
        prefix="v0=",
        timestamp="header:X-Slack-Request-Timestamp",
        signed="v0:{timestamp}:{body}",
    ),
    handshake=handshake,
    # With the app's id, because several apps may share one address.
    key=[["$.api_app_id", "$.event_id"], "$.event_id", "form:trigger_id"],
    # The content type decides that a command is a form, and is not signed.
    key_authenticated=False,
    # app_rate_limited has no id, and interactions are never repeated.
    on_missing_key="body_hash",
    type=kind,
    subject=[
        ["$.team_id", "$.event.channel"],
        ["$.team_id", "$.event.channel.id"],
        ["$.team_id", "$.event.item.channel"],
        ["$.team_id", "$.event.channel_id"],
        ["$.team_id", "$.event.user"],
        ["$.team_id", "$.event.user.id"],
        ["form:team_id", "form:channel_id"],
    ],
    preview=["$.event.text", ["form:command", "?form:text"]],
    event_time=["$.event.event_ts", "$.event_time"],
    horizon="6m",
    keep_keys="30d",
    budget="2s",
    facts={
        "scheme": "github.com/slackapi/python-slack-sdk slack_sdk/signature/__init__.py",
        "handshake": "docs.slack.dev/apis/events-api",
        "key": "docs.slack.dev/apis/events-api (that it is meant for this is unverified)",
        "horizon": "docs.slack.dev/apis/events-api (at once, 1 min, 5 min; unverified)",
        "budget": "docs.slack.dev/apis/events-api (3 s; unverified)",
    },
    samples={
        "message": Sample(
            _EVENT % '{"type":"message","channel":"C0100042","user":"U0100142","text":"Ol\\u00e1 :wave:",'
            '"ts":"{now}.000200","event_ts":"{now}.000200","channel_type":"channel"}'
        ),
        "app_mention": Sample(
            _EVENT % '{"type":"app_mention","channel":"C0100042","user":"U0100142","text":"<@U0100001> help",'
            '"ts":"{now}.000300","event_ts":"{now}.000300"}'
        ),
        "reaction_added": Sample(
            _EVENT % '{"type":"reaction_added","user":"U0100142","reaction":"tada","item_user":"U0100001",'
            '"item":{"type":"message","channel":"C0100042","ts":"{now}.000200"},"event_ts":"{now}.000400"}'
        ),
        "reaction_removed": Sample(
            _EVENT % '{"type":"reaction_removed","user":"U0100142","reaction":"tada",'
            '"item":{"type":"message","channel":"C0100042","ts":"{now}.000200"},"event_ts":"{now}.000500"}'
        ),
        "message.message_changed": Sample(
            _EVENT % '{"type":"message","subtype":"message_changed","channel":"C0100042","ts":"{now}.000600",'
            '"message":{"type":"message","user":"U0100142","text":"Ol\\u00e1!","ts":"{now}.000200"},'
            '"event_ts":"{now}.000600"}'
        ),
        "member_joined_channel": Sample(
            _EVENT % '{"type":"member_joined_channel","user":"U0100143","channel":"C0100042","team":"T0100042",'
            '"event_ts":"{now}.000700"}'
        ),
        "channel_created": Sample(
            _EVENT % '{"type":"channel_created","channel":{"id":"C0100043","name":"orders","created":{now},'
            '"creator":"U0100142"},"event_ts":"{now}.000800"}'
        ),
        "app_home_opened": Sample(
            _EVENT % '{"type":"app_home_opened","user":"U0100142","channel":"D0100042","tab":"home",'
            '"event_ts":"{now}.000900"}'
        ),
        "file_shared": Sample(
            _EVENT % '{"type":"file_shared","file_id":"F0100042","user_id":"U0100142","channel_id":"C0100042",'
            '"event_ts":"{now}.001000"}'
        ),
        "team_join": Sample(
            _EVENT % '{"type":"team_join","user":{"id":"U0100144","name":"bruno","is_bot":false},'
            '"event_ts":"{now}.001100"}'
        ),
    },
)
