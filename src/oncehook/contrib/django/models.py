"""What the admin lists, as models without tables: they carry names and permissions, the rows come from the desk.

The store's own tables change with its schema and do not say everything (`leased` is read off another one); the desk
shows the same here as in the API, the command line and the dashboard.
"""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Event(models.Model):
    """What is kept: one per source and key."""

    id: models.CharField[str, str] = models.CharField(primary_key=True, max_length=40)

    class Meta:
        """Looked at only."""

        managed = False
        default_permissions: ClassVar = ("view",)


class Delivery(models.Model):
    """One event for one destination."""

    id: models.CharField[str, str] = models.CharField(primary_key=True, max_length=40)

    class Meta:
        """Also replayed and discarded, by those who may."""

        managed = False
        default_permissions: ClassVar = ("view",)
        permissions: ClassVar = (
            ("replay_delivery", "Can replay a delivery"),
            ("discard_delivery", "Can discard a dead letter"),
        )
        verbose_name_plural = "deliveries"


class DeadLetter(models.Model):
    """A delivery that has given up. Who may look at deliveries, replay and discard them, may do so here."""

    id: models.CharField[str, str] = models.CharField(primary_key=True, max_length=40)

    class Meta:
        """The same permissions count as for deliveries."""

        managed = False
        default_permissions: ClassVar = ()
