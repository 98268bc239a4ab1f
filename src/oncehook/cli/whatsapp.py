"""`oncehook whatsapp`: send one message, or call an instance, for scripts and agents.

The API is that of a configured destination (`--destination`), or named by options and ONCEHOOK_WHATSAPP_… variables.
One JSON object on stdout; a failure is one line on stderr. A message is sent at once, and tried again by a policy
(`--retry`) for as long as the command runs: no inbox keeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click
import msgspec

from oncehook.cli.help import CommandGroup
from oncehook.cli.options import config_option, voice
from oncehook.cli.output import json_line, say
from oncehook.errors import ConfigError, OncehookError
from oncehook.http_client.proxy import named_proxy
from oncehook.human import suggest
from oncehook.logs import plain, set_up_logging
from oncehook.model import Category
from oncehook.retry import NAMED
from oncehook.secret import Secret
from oncehook.settings import load
from oncehook.whatsapp import messages
from oncehook.whatsapp.messages import InvalidMessage, MediaKind, Message
from oncehook.whatsapp.outcomes import SendFailed
from oncehook.whatsapp.sender import Sender
from oncehook.whatsapp.settings import UNKNOWN_TO, WhatsAppConfig, list_missing, sender_from

if TYPE_CHECKING:
    from oncehook.whatsapp.storage import S3Files

_ENV: Final = "ONCEHOOK_WHATSAPP_"
_PLAIN: Final = {
    "base_url": "Where the API is.",
    "instance": "The instance (Evolution).",
    "phone_number_id": "Who sends (Meta).",
    "version": "Version of the API (Meta).",
    "country": "Calling code of local numbers.",
}
_SECRET: Final = ("token", "api_key", "proxy")
_ONCE: Final = "none"
TIMEOUT: Final = 30.0


def _print_failure(error: OncehookError) -> None:
    tried = f"(tried {error.attempts} times)" if isinstance(error, SendFailed) and error.attempts > 1 else ""
    sentence = " ".join(f"{_code(error)}: {error} {tried} {error.hint}".split())
    click.echo(f"oncehook: {plain(sentence)}", err=True)


def _code(error: OncehookError) -> str:
    if not isinstance(error, SendFailed):
        return error.code
    return f"{error.reason.value} ({error.api_code})" if error.api_code else error.reason.value


def _exit_code(error: OncehookError) -> int:
    if isinstance(error, InvalidMessage | ConfigError):
        return 2
    if not isinstance(error, SendFailed) or error.status is not None:
        return 1
    # There was no answer: an invalid message was never sent, or nobody is there.
    return 2 if error.category is Category.permanent else 3


# -- which API ---------------------------------------------------------------------------------


Work = Callable[[Sender], Awaitable[Mapping[str, object]]]
Draft = Message | Callable[[Sender], Awaitable[Message]]


def _sends(command: Callable[..., Draft]) -> Callable[..., int]:
    """Turn a function that returns a message (or a function of the sender that does) into a command that sends it."""

    @click.option(
        "--retry",
        type=click.Choice([*NAMED, _ONCE]),
        default="quick",
        show_default=True,
        help="When to try again; never what may have been sent.",
    )
    @functools.wraps(command)
    def build_work(retry: str, **options: Any) -> Work:
        draft = command(**options)
        if not callable(draft):
            messages.check(draft)

        async def send(sender: Sender) -> Mapping[str, object]:
            message = await draft(sender) if callable(draft) else draft
            sent = await sender.send(message, retry=None if retry == _ONCE else retry)
            return {"message_id": sent.message_id, "status": sent.status, "attempts": sent.attempts}

        return send

    return _uses_sender(build_work)


def _in_chat(command: Callable[..., Draft]) -> Callable[..., Draft]:
    """Add the options of every message in a chat to a command; its function takes them as `**chat`."""

    @click.option("--reply-to", metavar="ID", help="The message that this one answers.")
    @click.option("--delay", type=click.IntRange(0), metavar="MS", default=0, help="Show us writing first (Evolution).")
    @click.option("--mention", "mentions", metavar="NUMBER", multiple=True, help="Mention this number (Evolution).")
    @click.option("--mention-all", is_flag=True, help="Mention everybody in the group (Evolution).")
    @functools.wraps(command)
    def in_chat(mentions: tuple[str, ...], **options: Any) -> Draft:
        return command(mentions=list(mentions), **options)

    return in_chat


def _uses_sender(command: Callable[..., Work]) -> Callable[..., int]:
    """Turn a function that returns work for an open sender into a command with the options that name the sender."""

    @config_option
    @click.option("--destination", metavar="NAME", envvar=f"{_ENV}DESTINATION", help="The sender of these settings.")
    @click.option("--api", type=click.Choice(list(UNKNOWN_TO)), envvar=f"{_ENV}API", help="Or which API.")
    @_plain_options
    @click.option("--allow-private", is_flag=True, help="The API may be in a private network.")
    @functools.wraps(command)
    def run(config_file: Path | None, destination: str | None, allow_private: bool, **options: Any) -> int:
        settings = {key: options.pop(key) for key in ("api", *_PLAIN)}
        if voice.verbose:
            set_up_logging("debug")
        else:  # the result is printed anyway, so nothing is logged
            logging.getLogger("oncehook").addHandler(logging.NullHandler())
        try:
            if destination is not None:
                sender = _from_destination(config_file, destination)
            else:
                sender = _from_options(settings, allow_private=allow_private)
            say([json_line(asyncio.run(_run(sender, command(**options))))])
        except OncehookError as error:
            _print_failure(error)
            return _exit_code(error)
        return 0

    return run


def _plain_options(command: Callable[..., int]) -> Callable[..., int]:
    for name, about in reversed(_PLAIN.items()):
        command = click.option(f"--{name.replace('_', '-')}", envvar=_ENV + name.upper(), help=about)(command)
    return command


async def _run(sender: Sender, work: Work) -> Mapping[str, object]:
    async with sender, contextlib.AsyncExitStack() as stack:
        if (close := getattr(sender.files, "close", None)) is not None:
            stack.push_async_callback(close)
        return await work(sender)


def _from_destination(config_file: Path | None, name: str) -> Sender:
    config = load(config_file, whole=False).config
    senders = {known: one for known, one in config.destination.items() if hasattr(one, "whatsapp")}
    if name not in senders:
        raise ConfigError(f'There is no whatsapp destination "{name}".', hint=suggest(name, senders))
    found = senders[name]
    return sender_from(found.whatsapp, timeout=found.timeout, allow_private=found.allow_private, ca=found.ca)


def _from_options(settings: Mapping[str, str | None], *, allow_private: bool) -> Sender:
    api = settings["api"] or _api_of_others()
    if api is None:
        raise ConfigError("Which API?", hint="Say --destination NAME, or --api meta, evolution-api or evolution-go.")
    known: dict[str, Any] = {key: value for key, value in settings.items() if value} | {"api": api}
    for key in _SECRET:  # never an option: every user of the machine can read the options of a process
        if os.environ.get(variable := _ENV + key.upper()):
            known[key] = Secret.from_env(variable)
    if "base_url" not in known:  # a key from Evolution's own variables is for their server only
        known = _of_others(api) | known
    if named_proxy(os.environ, known.get("instance") or known.get("phone_number_id")):
        known.setdefault("proxy", "env")
    config = WhatsAppConfig(**{key: value for key, value in known.items() if key not in UNKNOWN_TO[api]})
    if missing := list_missing(config):
        raise ConfigError(
            f"{api} needs {' and '.join(missing)}.", hint=f"Set {', '.join(_ENV + key.upper() for key in missing)}."
        )
    return sender_from(config, files=_files(), timeout=TIMEOUT, allow_private=allow_private)


_OTHERS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "evolution-api": {"base_url": ("EVOLUTION_API_URL",), "api_key": ("EVOLUTION_API_KEY",)},
    "evolution-go": {
        "base_url": ("EVOLUTION_GO_URL",),
        "token": ("EVOLUTION_GO_INSTANCE_TOKEN", "EVOLUTION_GO_KEY"),
        "api_key": ("EVOLUTION_GO_KEY",),
    },
}
"""Variables of other programs, read where ours are not set."""


def _api_of_others() -> str | None:
    """Return the API whose address Evolution's own variables hold; None where both are set."""
    named = [api for api, variables in _OTHERS.items() if os.environ.get(variables["base_url"][0])]
    return named[0] if len(named) == 1 else None


def _of_others(api: str) -> dict[str, Any]:
    found = {key: next(filter(os.environ.get, variables), None) for key, variables in _OTHERS.get(api, {}).items()}
    if not found.get("base_url"):
        return {}
    return {
        key: os.environ[variable] if key in _PLAIN else Secret.from_env(variable)
        for key, variable in found.items()
        if variable
    }


def _files() -> S3Files | None:
    from oncehook.whatsapp.storage import S3Files

    return S3Files.from_env(os.environ) if S3Files.named_in(os.environ) else None


# -- commands ----------------------------------------------------------------------------------


@click.group("whatsapp", cls=CommandGroup)
def whatsapp() -> None:
    """Send a message over WhatsApp, or look after an instance. JSON on stdout; exit 1 when it was not sent.

    Secrets come from ONCEHOOK_WHATSAPP_TOKEN, _API_KEY and _PROXY, or from the settings of --destination.
    """


@whatsapp.command("send-text")
@click.argument("to")
@click.argument("text")
@click.option("--preview-url", is_flag=True, help="Show the first link in it with a picture.")
@_sends
@_in_chat
def send_text(to: str, text: str, preview_url: bool, **chat: Any) -> Message:
    """Send TEXT to the number TO."""
    return messages.Text(to=to, text=text, preview_url=preview_url, **chat)


@whatsapp.command("notify")
@click.argument("text")
@click.option(
    "--to",
    metavar="NUMBER",
    required=True,
    envvar=[f"{_ENV}NOTIFY_TO", "NOTIFY_WHATSAPP_PHONE"],
    help="The number to notify.",
)
@_sends
def notify(text: str, to: str) -> Message:
    """Send TEXT to the person who looks after this machine."""
    return messages.Text(to=to, text=text)


@whatsapp.command("send-file")
@click.argument("to")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--caption", help="Words below it.")
@click.option("--filename", help="What the recipient sees it called.")
@click.option("--kind", type=click.Choice(get_args(MediaKind)), help="Instead of what its bytes say.")
@_sends
@_in_chat
def send_file(to: str, file: Path, **chat: Any) -> Draft:
    """Send FILE to the number TO: stored in the bucket (ONCEHOOK_S3_…, or `files` of the settings), sent as a link."""
    return lambda sender: sender.prepare_file(to, file, **chat)


@whatsapp.command("send-media")
@click.argument("to")
@click.argument("kind", type=click.Choice(get_args(MediaKind)))
@click.argument("url")
@click.option("--caption", help="Words below it.")
@click.option("--filename", help="What the recipient sees it called.")
@_sends
@_in_chat
def send_media(to: str, kind: MediaKind, url: str, **chat: Any) -> Message:
    """Send what is at the web address URL to the number TO, as an image, video, audio, document or sticker."""
    return messages.Media(to=to, kind=kind, link=url, **chat)


@whatsapp.command("send-link")
@click.argument("to")
@click.argument("url")
@click.option("--text", default="", help="Words before it.")
@click.option("--title", help="Instead of the page's (Evolution Go).")
@click.option("--description", help="Instead of the page's (Evolution Go).")
@click.option("--image", metavar="URL", help="Instead of the page's (Evolution Go).")
@_sends
@_in_chat
def send_link(to: str, url: str, **chat: Any) -> Message:
    """Send the web address URL to the number TO, shown as a card."""
    return messages.Link(to=to, url=url, **chat)


@whatsapp.command("send-location", context_settings={"ignore_unknown_options": True})
@click.argument("to")
@click.argument("latitude", type=float)
@click.argument("longitude", type=float)
@click.option("--name", help="What the place is called.")
@click.option("--address", help="Where it is, in words.")
@_sends
@_in_chat
def send_location(to: str, latitude: float, longitude: float, **chat: Any) -> Message:
    """Send a place on the map to the number TO: its LATITUDE and LONGITUDE in degrees."""
    return messages.Location(to=to, latitude=latitude, longitude=longitude, **chat)


@whatsapp.command("send-contact")
@click.argument("to")
@click.argument("name")
@click.argument("phone")
@click.option("--organization", help="Where they work.")
@_sends
@_in_chat
def send_contact(to: str, name: str, phone: str, **chat: Any) -> Message:
    """Send somebody's NAME and PHONE to the number TO."""
    return messages.Contact(to=to, name=name, phone=phone, **chat)


@whatsapp.command("send-poll")
@click.argument("to")
@click.argument("question")
@click.argument("options", nargs=-1, required=True, metavar="OPTION...")
@click.option("--max-answers", default=1, show_default=True, help="How many one person may choose.")
@_sends
@_in_chat
def send_poll(to: str, question: str, options: tuple[str, ...], **chat: Any) -> Message:
    """Ask the number TO a QUESTION with 2 to 12 answers to choose from (Evolution)."""
    return messages.Poll(to=to, question=question, options=list(options), **chat)


@whatsapp.command("send-template")
@click.argument("to")
@click.argument("name")
@click.option("--language", default="en_US", show_default=True, help="Language of the template.")
@click.option("--components", metavar="JSON", default="[]", help="Its components, as the API wants them.")
@_sends
def send_template(to: str, name: str, language: str, components: str) -> Message:
    """Send the approved template NAME to the number TO (Meta)."""
    try:
        parts = msgspec.json.decode(components, type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        raise InvalidMessage(f"--components is no JSON list of objects: {error}") from None
    return messages.Template(to=to, name=name, language=language, components=parts)


@whatsapp.command("react")
@click.argument("to")
@click.argument("message_id")
@click.argument("emoji")
@click.option("--from-me", is_flag=True, help="The message was one of our own.")
@click.option("--participant", metavar="NUMBER", help="Who wrote it, in a group (Evolution).")
@_sends
def react(to: str, message_id: str, emoji: str, from_me: bool, participant: str | None) -> Message:
    """Put EMOJI on a message of the chat with TO; an empty one takes it back."""
    return messages.Reaction(to=to, message_id=message_id, emoji=emoji, from_me=from_me, participant=participant)


@whatsapp.command("read")
@click.argument("message_id")
@click.option("--to", help="Whose message it was (Evolution).")
@_sends
def read(message_id: str, to: str | None) -> Message:
    """Mark a message as read."""
    return messages.Read(message_id=message_id, to=to)


@whatsapp.command("edit")
@click.argument("to")
@click.argument("message_id")
@click.argument("text")
@_uses_sender
def edit(to: str, message_id: str, text: str) -> Work:
    """Replace the words of a message that we sent to TO (Evolution)."""
    return lambda sender: sender.instance("edit", to=to, message_id=message_id, text=text)


@whatsapp.command("delete-message")
@click.argument("to")
@click.argument("message_id")
@click.option("--participant", metavar="NUMBER", help="Who wrote it, in a group that we look after (Evolution API).")
@_uses_sender
def delete_message(to: str, message_id: str, participant: str | None) -> Work:
    """Take a message in the chat with TO back for everybody (Evolution)."""
    others = {} if participant is None else {"participant": participant, "from_me": False}
    return lambda sender: sender.instance("delete_message", to=to, message_id=message_id, **others)


@whatsapp.command("message-status")
@click.argument("message_id")
@_uses_sender
def message_status(message_id: str) -> Work:
    """Show how far a message has come (Evolution)."""
    return lambda sender: sender.instance("message_status", message_id=message_id)


@whatsapp.command("presence")
@click.argument("to")
@click.argument("state", type=click.Choice(["composing", "recording", "paused"]))
@_uses_sender
def presence(to: str, state: str) -> Work:
    """Show TO that we are writing, or recording, or not any more (Evolution)."""
    return lambda sender: sender.instance("presence", to=to, state=state)


@whatsapp.command("instances")
@_uses_sender
def instances() -> Work:
    """List all instances, as the server knows them (Evolution)."""
    return lambda sender: sender.instance("instances")


@whatsapp.command("summary")
@_uses_sender
def summary() -> Work:
    """List all instances by name, and which of them are connected (Evolution)."""
    return lambda sender: sender.instance("summary")


@whatsapp.command("instance")
@click.argument("action")
@click.argument("options", nargs=-1, metavar="[NAME=VALUE]...")
@_uses_sender
def instance(action: str, options: tuple[str, ...]) -> Work:
    """Call an instance: state, connect, logout … as the API has them; its answer as JSON."""
    named = dict(_pair(option) for option in options)
    return lambda sender: sender.instance(action, **named)


def _pair(option: str) -> tuple[str, Any]:
    name, sign, value = option.partition("=")
    if not sign or not name.isidentifier():
        raise InvalidMessage(f"{option!r} is no NAME=VALUE.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
