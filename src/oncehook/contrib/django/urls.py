"""`path("hooks/", include("oncehook.contrib.django.urls"))` gives POST /hooks/{source}, and GET for handshakes.

`path("inbox/", dashboard())` gives dashboard and API, for the project's staff.
"""

from __future__ import annotations

from django.http import HttpRequest
from django.urls import URLPattern, re_path

from oncehook.contrib.django import views
from oncehook.contrib.django.views import hook, show_dashboard
from oncehook.web.auth import AuthorizeBlocking

__all__ = ["dashboard"]

app_name = "oncehook"
urlpatterns = [re_path(r"^(?P<rest>.+)$", hook, name="hook")]


def dashboard(*, authorize: AuthorizeBlocking[HttpRequest] = views.staff) -> tuple[list[URLPattern], str, str]:
    """Return the URLs of dashboard and API, like `admin.site.urls`: `path("inbox/", dashboard())`.

    `authorize` takes each request and returns who makes it: a name for the audit log and the role "viewer", "operator"
    or "admin", as `("anna", "operator")`; a role alone; or None for nobody. By default staff has its permissions.
    """
    name = "oncehook_dashboard"
    return [re_path(r"^(?P<rest>.*)$", show_dashboard(authorize), name="dashboard")], name, name
