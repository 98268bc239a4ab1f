"""For uvicorn: `uvicorn shop.asgi:application`, with the dashboard at /inbox/ for whoever is logged in as staff."""

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
django = get_asgi_application()

from oncehook.contrib.django.asgi import with_inbox  # noqa: E402 - only after Django is set up

application = with_inbox(django, hooks="/hooks", dashboard="/inbox")
