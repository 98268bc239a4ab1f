"""Help pages: bold headings, groups of commands, one example each, and the variables in one closing line.

A command that is misspelt is an error that names the nearest one, in groups of commands, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from oncehook.human import nearest
from oncehook.logs import plain

EXAMPLES: Final = {
    "serve": "oncehook serve app:inbox --reload",
    "worker": "oncehook worker app:inbox --destination crm",
    "demo": "oncehook demo --rate 5",
    "bench": "oncehook bench --seconds 10",
    "tail": "oncehook tail --source stripe --status dead",
    "events": "oncehook events source:stripe status:dead since:2h",
    "show": "oncehook show evt_…3a5d2c --body",
    "rejected": "oncehook rejected --source stripe --headers",
    "dead": "oncehook dead --destination crm",
    "dead discard": 'oncehook dead discard to:crm since:1d --reason "sent by hand"',
    "sources": "oncehook sources --wide",
    "sources create": "oncehook sources create trigger-4 preset=n8n secret=generate",
    "sources change": "oncehook sources change trigger-4 keep_events=90d",
    "sources rotate": "oncehook sources rotate trigger-4 --overlap 2h",
    "sources enable": "oncehook sources enable trigger-4",
    "sources disable": "oncehook sources disable trigger-4",
    "sources delete": "oncehook sources delete trigger-4 --yes",
    "destinations": "oncehook destinations --json",
    "destinations create": "oncehook destinations create crm url=https://crm.example/hooks sign=generate",
    "destinations change": "oncehook destinations change crm rate=20/s timeout=5s",
    "destinations rotate": "oncehook destinations rotate crm --overlap 1d",
    "destinations enable": "oncehook destinations enable crm",
    "destinations disable": "oncehook destinations disable crm",
    "destinations delete": "oncehook destinations delete crm --discard",
    "routes": "oncehook routes",
    "routes create": "oncehook routes create from=trigger-4 to=crm 'when={type=\"message.*\"}'",
    "routes change": "oncehook routes change rte_3f9a priority=low",
    "routes enable": "oncehook routes enable rte_3f9a",
    "routes disable": "oncehook routes disable rte_3f9a",
    "routes delete": "oncehook routes delete rte_3f9a",
    "accounts": "oncehook accounts",
    "accounts list": "oncehook accounts list --json",
    "accounts create": "oncehook accounts create 42 --alias 1065403 --secret shopify=generate",
    "accounts show": "oncehook accounts show 42",
    "accounts change": 'oncehook accounts change 42 --name "Tea & Co" --alias 1065403',
    "accounts rotate": "oncehook accounts rotate 42 shopify --overlap 1d",
    "accounts delete": "oncehook accounts delete 42 --yes",
    "portal link": "oncehook portal link --account 42 --name ana@shop.example",
    "stats": "oncehook stats --since 7d --by destination",
    "open": "oncehook open evt_…3a5d2c",
    "send": "oncehook send stripe invoice.paid --set data.object.amount_paid=500 --repeat 2",
    "forward": "oncehook forward stripe --to http://localhost:8000/hooks",
    "replay": "oncehook replay --query 'status:dead to:crm since:2h' --rate 20/s",
    "pause": 'oncehook pause crm --reason "moving to a new server"',
    "resume": "oncehook resume crm",
    "mark": 'oncehook mark "v1.2"',
    "erase": 'oncehook erase --subject 5511988880142 --reason "asked by the customer" --dry-run',
    "import keys": "oncehook import keys processed.csv --source stripe --column event_id",
    "import archive": "oncehook import archive 2026-11-18",
    "import definitions": "oncehook import definitions staging.toml --dry-run",
    "export": "oncehook export source:stripe since:30d --output stripe.jsonl",
    "keys claim": "oncehook keys claim refund:42 --ttl 30s",
    "keys commit": "oncehook keys commit refund:42 --token TOKEN --result done",
    "keys release": "oncehook keys release refund:42 --token TOKEN",
    "keys show": "oncehook keys show refund:42",
    "whatsapp send-text": 'oncehook whatsapp send-text +5511988880142 "Your order is on its way"',
    "whatsapp notify": 'oncehook whatsapp notify "The backup failed"',
    "whatsapp send-file": "oncehook whatsapp send-file +5511988880142 invoice.pdf --caption Invoice",
    "whatsapp send-media": "oncehook whatsapp send-media +5511988880142 image https://shop.example/tea.jpg",
    "whatsapp send-link": "oncehook whatsapp send-link +5511988880142 https://shop.example/tea",
    "whatsapp send-location": "oncehook whatsapp send-location +5511988880142 52.52 13.40 --name Shop",
    "whatsapp send-contact": "oncehook whatsapp send-contact +5511988880142 Ana +5521977770381",
    "whatsapp send-poll": 'oncehook whatsapp send-poll +5511988880142 "When?" Monday Tuesday',
    "whatsapp send-template": "oncehook whatsapp send-template +5511988880142 order_shipped --language pt_BR",
    "whatsapp react": "oncehook whatsapp react +5511988880142 wamid.HBgN 👍",
    "whatsapp read": "oncehook whatsapp read wamid.HBgN",
    "whatsapp edit": 'oncehook whatsapp edit +5511988880142 MESSAGE_ID "At four, not three"',
    "whatsapp delete-message": "oncehook whatsapp delete-message +5511988880142 MESSAGE_ID",
    "whatsapp message-status": "oncehook whatsapp message-status MESSAGE_ID",
    "whatsapp presence": "oncehook whatsapp presence +5511988880142 composing",
    "whatsapp instances": "oncehook whatsapp instances",
    "whatsapp summary": "oncehook whatsapp summary",
    "whatsapp instance": "oncehook whatsapp instance connect",
    "init": "oncehook init --from stripe --to https://app.example/hooks --store sqlite:./oncehook.db",
    "config check": "oncehook config check app:inbox",
    "config show": "oncehook config show --json",
    "config schema": "oncehook config schema > oncehook.schema.json",
    "config reference": "oncehook config reference > settings.md",
    "db migrate": "oncehook db migrate",
    "db status": "oncehook db status",
    "db sql": "oncehook db sql --engine postgres",
    "db prune": "oncehook db prune",
    "db backup": "oncehook db backup monday.db",
    "db restored": "oncehook db restored",
    "token": "oncehook token grafana --role viewer --expires 90d",
    "doctor": "oncehook doctor app:inbox",
    "health": "oncehook health --server http://127.0.0.1:4020",
    "completion": 'eval "$(oncehook completion bash)"',
    "version": "oncehook version",
}
"""By a command's whole name: a use of it that can be pasted."""


class _Formatter(click.HelpFormatter):
    """A formatter with bold headings; click removes the codes where the output is no terminal."""

    def write_heading(self, heading: str) -> None:
        self.write(f"{'':>{self.current_indent}}{click.style(f'{heading}:', bold=True)}\n")

    def write_example(self, example: str) -> None:
        with self.section("Example"):
            self.write(f"{'':>{self.current_indent}}{example}\n")


class HelpContext(click.Context):
    formatter_class = _Formatter


class CommandGroup(click.Group):
    """A group that lists whole sentences, and suggests the nearest command for a misspelt one."""

    context_class = HelpContext

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_sentence(one)) for name, one in sorted(self.commands.items())])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            near = nearest(name, self.list_commands(ctx))
            raise Misspelt(f'There is no command "{name[:60]}".', f'Did you mean "{near}"?' if near else "", ctx)
        return super().resolve_command(ctx, args)


class Misspelt(click.UsageError):
    """A word that is not known, with a hint at the nearest one."""

    def __init__(self, message: str, hint: str, ctx: click.Context | None = None) -> None:
        super().__init__(message, ctx)
        self.hint = hint


def _first_sentence(command: click.Command) -> str:
    first = " ".join((command.help or "").partition("\n\n")[0].replace("\b", "").split())
    return first.partition(". ")[0].removesuffix(".") + "."


def add_help(command: click.Command, names: Sequence[str]) -> None:
    """Give a command's help page its example and its variables."""
    if not isinstance(command, CommandGroup):
        command.context_class = HelpContext
    before = command.format_epilog

    def format_epilog(ctx: click.Context, formatter: click.HelpFormatter) -> None:
        before(ctx, formatter)
        if (example := EXAMPLES.get(" ".join(names))) and isinstance(formatter, _Formatter):
            formatter.write_example(example)
        if said := _variables(command, names):
            formatter.write_paragraph()
            formatter.write_text(said)

    command.format_epilog = format_epilog  # type: ignore[method-assign]


def _variables(command: click.Command, names: Sequence[str]) -> str:
    """Return a line about the variables of the options: by the pattern, for all commands, and by other names."""
    prefix = "_".join(["ONCEHOOK", *names, ""]).upper().replace("-", "_")
    own: list[tuple[str, str]] = []
    shared: list[tuple[str, str]] = []
    others: list[tuple[str, str]] = []
    for option in command.params:
        if not isinstance(option, click.Option) or not option.envvar:
            continue
        first, *more = [option.envvar] if isinstance(option.envvar, str) else option.envvar
        word = max(option.opts, key=len)
        tail = word.lstrip("-").upper().replace("-", "_")
        kind = own if first == prefix + tail else shared if first == f"ONCEHOOK_{tail}" else others
        kind.append((first, word))
        others += [(name, word) for name in more]
    said = [f"{prefix}… for its own options ({own[0][1]}: {own[0][0]})"] if own else []
    said += [", ".join(name for name, _ in shared)] if shared else []
    said += [", ".join(f"{name} for {word}" for name, word in others)] if others else []
    return f"Variables: {'; '.join(said)}." if said else ""


def show_error(error: click.ClickException, program: str) -> tuple[str, str]:
    """Return a usage error and its hint, in the same style as every other error."""
    hint = str(getattr(error, "hint", "") or "")
    if not hint and isinstance(error, click.UsageError) and error.ctx is not None:
        path = error.ctx.command_path.removeprefix(error.ctx.find_root().info_name or "")
        hint = f"Try: {program or 'oncehook'}{path} --help"
    return plain(" ".join(error.format_message().split())), plain(hint)
