"""The inbox in a Django project: `INSTALLED_APPS += ["oncehook.contrib.django"]` and a settings dict `ONCEHOOK`.

`inbox` is the one of this process, for `<app>/hooks.py`; `bridge` runs it for views and scripts, which have no event
loop: `bridge.call(inbox.emit("app", "paid", {…}))`. Both are built at their first use, because Django imports this
package before its settings are ready.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncehook.contrib.bridge import Bridge
    from oncehook.contrib.django.assembly import DjangoInbox

    inbox: DjangoInbox
    bridge: Bridge

__all__ = ["bridge", "inbox"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from oncehook.contrib.django import assembly

    return assembly.get_inbox() if name == "inbox" else assembly.get_bridge()
