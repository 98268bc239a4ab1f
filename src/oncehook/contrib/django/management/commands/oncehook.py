"""`manage.py oncehook serve|worker|events|…`: the ordinary command line, with this project's inbox."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from django.core.management.base import BaseCommand, CommandError

from oncehook.contrib.django import assembly

APP: Final = "oncehook.contrib.django:inbox"


class Command(BaseCommand):
    help = "The webhook inbox: serve, worker, events, replay, dead and all other commands of `oncehook`."
    requires_system_checks: tuple[str, ...] = ()

    def run_from_argv(self, argv: list[str]) -> NoReturn:
        """Pass everything after `oncehook` on, except Django's own options."""
        own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        own.add_argument("--settings")
        own.add_argument("--pythonpath")
        _, others = own.parse_known_args(argv[2:])
        _run(others)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Accept any arguments, for `call_command("oncehook", "worker", "--drain")`."""
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def handle(self, *args: str, **options: Any) -> None:
        """Run a command; raise CommandError where it would have exited."""
        try:
            _run(options["arguments"])
        except SystemExit as end:
            if end.code:
                raise CommandError("oncehook has failed", returncode=int(end.code)) from end


def _run(arguments: Sequence[str]) -> NoReturn:
    from oncehook.cli import main

    if (url := assembly.store_url()) is not None:
        os.environ["ONCEHOOK_STORE"] = url  # for commands that open the store without an inbox
    main(arguments, program="manage.py oncehook", defaults=_defaults())


def _defaults() -> Mapping[str, Any]:
    from oncehook.cli import COMMANDS
    from oncehook.cli.db import db
    from oncehook.contrib.django.assembly import beside_manage

    given = assembly.read_settings()
    file = {"config_file": str(beside_manage(given["CONFIG"]))} if "CONFIG" in given else {}
    # `oncehook --version` is an option, too, and would take these defaults for its own.
    options = {name: {"app": APP, **file} for name in COMMANDS if name != "version"}
    return options | {"db": dict.fromkeys(db.commands, file)}
