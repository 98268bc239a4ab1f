"""What happens when the shop says that an order has changed.

Two hooks of one order may arrive a microsecond apart, in two processes. They are of one subject, so they are handled
one after the other, each in a transaction that also marks it done: neither looks out for rivals, and neither quits.
"""

from oncehook import Event
from oncehook.contrib.django import inbox
from orders.models import Order


@inbox.on("shop", "order.*", atomic=True, retry="quick")
def keep(event: Event) -> None:
    """Look, then write: safe here, because nobody else is at this order meanwhile."""
    said = event.json()["order"]
    order = Order.objects.filter(number=said["number"]).first() or Order(number=said["number"])
    order.status = said["status"]
    order.changes += 1
    order.save()
