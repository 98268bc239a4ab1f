"""The usual Django view: a Redis SET NX in front of the insert, PostgreSQL behind it; gunicorn with 4 workers.

Settings, middleware and applications are those that `startproject` writes, without the admin; connections to the
database stay open between requests.
"""

from __future__ import annotations

import json
import os
from datetime import datetime
from urllib.parse import parse_qs, urlsplit

import django
import redis
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.db import IntegrityError, connection, models
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from bench.views import STORE, genuine

DAY = 24 * 3600
_store = urlsplit(STORE)

settings.configure(
    SECRET_KEY="only-for-the-benchmark",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    USE_TZ=True,
    INSTALLED_APPS=[
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django.contrib.sessions",
        "django.contrib.messages",
    ],
    MIDDLEWARE=[
        "django.middleware.security.SecurityMiddleware",
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.middleware.common.CommonMiddleware",
        "django.middleware.csrf.CsrfViewMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
        "django.middleware.clickjacking.XFrameOptionsMiddleware",
    ],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": _store.path.lstrip("/"),
            "USER": _store.username,
            "HOST": parse_qs(_store.query)["host"][0],
            "CONN_MAX_AGE": 600,
        }
    },
)
django.setup()

seen = redis.Redis.from_url(os.environ.get("BENCH_REDIS", "redis://127.0.0.1"))


class Event(models.Model):
    """One row per key."""

    key: models.CharField[str, str] = models.CharField(max_length=200, unique=True)
    body: models.BinaryField[bytes, bytes] = models.BinaryField()
    received_at: models.DateTimeField[datetime, datetime] = models.DateTimeField(auto_now_add=True)

    class Meta:
        app_label = "inbox"
        db_table = "events"


@csrf_exempt
def hook(request: HttpRequest) -> JsonResponse:
    """Take a webhook."""
    if not genuine(request.body, request.headers.get("X-Signature", "")):
        return JsonResponse({"error": "bad signature"}, status=401)
    key = json.loads(request.body)["id"]
    if not seen.set(f"webhook:{key}", "1", nx=True, ex=DAY):
        return JsonResponse({"status": "duplicate"})
    try:
        Event.objects.create(key=key, body=request.body)
    except IntegrityError:
        return JsonResponse({"status": "duplicate"})
    return JsonResponse({"status": "accepted"})


urlpatterns = [path("hook", hook)]
app = get_wsgi_application()


if __name__ == "__main__":
    with connection.schema_editor() as editor:
        editor.create_model(Event)
