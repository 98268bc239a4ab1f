"""What is known about an order."""

from django.db import models


class Order(models.Model):
    """One order. Nothing but the inbox keeps two of the same number apart: there is no unique constraint here."""

    number = models.CharField(max_length=40, db_index=True)
    status = models.CharField(max_length=40)
    changes = models.PositiveIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.number} {self.status}"
