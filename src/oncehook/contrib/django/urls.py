"""`path("hooks/", include("oncehook.contrib.django.urls"))` gives POST /hooks/{source}, and GET for handshakes."""

from __future__ import annotations

from django.urls import re_path

from oncehook.contrib.django.views import hook

app_name = "oncehook"
urlpatterns = [re_path(r"^(?P<rest>.+)$", hook, name="hook")]
