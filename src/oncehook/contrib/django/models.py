"""Models without tables for the admin's lists: they have names and permissions, the rows come from `Inbox.admin`.

The store's own tables change with its schema and are incomplete (`leased` is in another one); `Inbox.admin` shows the
same here as in the API, the command line and the dashboard.
"""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Event(models.Model):
    id: models.CharField[str, str] = models.CharField(primary_key=True, max_length=40)

    class Meta:
        managed = False
        default_permissions: ClassVar = ("view",)


class Delivery(models.Model):
    id: models.CharField[str, str] = models.CharField(primary_key=True, max_length=40)

    class Meta:
        managed = False
        default_permissions: ClassVar = ("view",)
        permissions: ClassVar = (
            ("replay_delivery", "Can replay a delivery"),
            ("discard_delivery", "Can discard a dead letter"),
        )
        verbose_name_plural = "deliveries"


class DeadLetter(models.Model):
    """A delivery that has failed for good, with the permissions of `Delivery`."""

    id: models.CharField[str, str] = models.CharField(primary_key=True, max_length=40)

    class Meta:
        managed = False
        default_permissions: ClassVar = ()
