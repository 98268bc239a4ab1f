"""Telegram bots: one update per request, proven by a token in a header and by nothing else.

`update_id` counts up per bot, but restarts at a random number after a week of silence: a smaller one is not older. So
one source is one bot.
"""

from __future__ import annotations

from typing import Final

from oncehook.rules import RuleContext
from oncehook.sources import Preset, Sample
from oncehook.verify import Token


def kind(context: RuleContext) -> str | None:
    """Return the name of the one field beside `update_id`: `message`, `callback_query`."""
    return next((name for name in context.data if name != "update_id"), None)


_USER: Final = '{"id":710000142,"is_bot":false,"first_name":"Ana","language_code":"pt"}'
_CHAT: Final = '{"id":710000142,"first_name":"Ana","type":"private"}'
_CHANNEL: Final = '{"id":-1001420000042,"title":"Tea and Co","type":"channel"}'


def _update(kind: str, about: str) -> Sample:
    return Sample(f'{{"update_id":{{number}},"{kind}":{{{about}}}}}')


PRESET = Preset(
    name="telegram",
    title="Telegram Bot API",
    scheme=Token(place="header:X-Telegram-Bot-Api-Secret-Token"),
    body_authenticated=False,
    key_authenticated=False,
    key="$.update_id",
    on_missing_key="body_hash",
    type=kind,
    # The chat, if there is one; for a pressed button, the chat of its message; otherwise a person or a poll.
    subject=[
        "$.*.chat.id",
        "$.callback_query.message.chat.id",
        "$.*.user_chat_id",
        "$.*.from.id",
        "$.*.user.id",
        "$.poll.id",
    ],
    # The button's data is the answer; the text above it is the question.
    preview=["$.callback_query.data", "$.*.text", "$.*.caption", "$.*.query"],
    # An edited message keeps the date it was sent.
    event_time=["$.*.edit_date", "$.*.date"],
    horizon="24h",
    # No longer: after a silence, a new id could equal one that is still kept.
    keep_keys="7d",
    budget="2s",
    facts={
        "scheme": "core.telegram.org/bots/api#setwebhook",
        "key": "core.telegram.org/bots/api#update",
        "type": "core.telegram.org/bots/api#update",
        "horizon": "core.telegram.org/bots/api#getting-updates (kept 24 hours; schedule unpublished)",
        "budget": "unverified",
    },
    samples={
        "message": Sample(
            '{"update_id":{number},"message":{"message_id":1365,"from":' + _USER + ',"chat":' + _CHAT + ","
            '"date":{now},"text":"Ol\\u00e1"}}'
        ),
        "callback_query": Sample(
            '{"update_id":{number},"callback_query":{"id":"3{number}","from":' + _USER + ',"message":'
            '{"message_id":1366,"chat":' + _CHAT + ',"date":{now},"text":"Confirm?"},'
            '"chat_instance":"-3788","data":"confirm"}}'
        ),
        "edited_message": Sample(
            '{"update_id":{number},"edited_message":{"message_id":1365,"from":' + _USER + ',"chat":' + _CHAT + ","
            '"date":{now},"edit_date":{now},"text":"Ol\\u00e1!"}}'
        ),
        "channel_post": _update("channel_post", '"message_id":7,"chat":' + _CHANNEL + ',"date":{now},"text":"News"'),
        "edited_channel_post": _update(
            "edited_channel_post",
            '"message_id":7,"chat":' + _CHANNEL + ',"date":{now},"edit_date":{now},"text":"News!"',
        ),
        "inline_query": _update("inline_query", '"id":"4{number}","from":' + _USER + ',"query":"tea","offset":""'),
        "chosen_inline_result": _update(
            "chosen_inline_result", '"result_id":"7","from":' + _USER + ',"query":"green tea"'
        ),
        "pre_checkout_query": _update(
            "pre_checkout_query",
            '"id":"5{number}","from":' + _USER + ',"currency":"EUR","total_amount":4200,"invoice_payload":"order-42"',
        ),
        "poll": _update(
            "poll",
            '"id":"6{number}","question":"When?","options":[{"text":"Monday","voter_count":1}],"total_voter_count":1,'
            '"is_closed":false,"is_anonymous":true,"type":"regular","allows_multiple_answers":false',
        ),
        "poll_answer": _update("poll_answer", '"poll_id":"6{number}","user":' + _USER + ',"option_ids":[0]'),
        "my_chat_member": _update(
            "my_chat_member",
            '"chat":'
            + _CHAT
            + ',"from":'
            + _USER
            + ',"date":{now},"old_chat_member":{"user":'
            + _USER
            + ',"status":"member"},"new_chat_member":{"user":'
            + _USER
            + ',"status":"kicked","until_date":0}',
        ),
    },
)
