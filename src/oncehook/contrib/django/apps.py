"""The Django app: finds handlers when Django starts, and brings the schema along with `manage.py migrate`."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules

from oncehook.contrib.django import assembly
from oncehook.settings.build import open_store


class OncehookConfig(AppConfig):
    """The webhook inbox."""

    name = "oncehook.contrib.django"
    label = "oncehook"
    verbose_name = "Webhook inbox"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Build the inbox, so that a wrong setting is refused now, and import every app's `hooks.py`."""
        assembly.get_bridge()
        autodiscover_modules("hooks")
        post_migrate.connect(bring_schema, sender=self)


def bring_schema(using: str, verbosity: int = 1, **_: Any) -> None:
    """Migrate the store after `manage.py migrate`, with the store's own runner.

    As Django migrations, the same SQL would have two histories and two locks. Like this, `oncehook serve`, `oncehook db
    migrate` and Django share one, and a newer oncehook adds no file to any project.
    """
    if using != assembly.alias():
        return
    failures: list[BaseException] = []
    # On its own thread, because the caller may have a running loop.
    thread = threading.Thread(target=_migrate, args=[assembly.database_url(using, _schema()), failures])
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    if verbosity >= 2:
        print(f'  Schema "{_schema()}" of the webhook inbox is up to date')  # noqa: T201 - as Django does


def _schema() -> str:
    return str(assembly.read_settings().get("SCHEMA", "oncehook"))


def _migrate(url: str, failures: list[BaseException]) -> None:
    async def migrate() -> None:
        store = open_store(url)
        try:
            await store.open(migrate=True)
        finally:
            await store.close()

    try:
        asyncio.run(migrate())
    except BaseException as error:
        failures.append(error)
