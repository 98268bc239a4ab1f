"""Which of the project's people may see and do what at the dashboard."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from oncehook.model import RoleName
from oncehook.web.auth import Authorized


def role_of(user: Any) -> RoleName | None:
    """Superusers are admins; of the staff, who may replay and discard are operators, who may look are viewers."""
    if not (user.is_active and user.is_staff):
        return None
    if user.is_superuser:
        return "admin"
    if user.has_perms(["oncehook.replay_delivery", "oncehook.discard_delivery"]):
        return "operator"
    return "viewer" if user.has_perms(["oncehook.view_event", "oncehook.view_delivery"]) else None


def authorized(user: Any) -> Authorized:
    """The user's name, for the audit log, and role; None for whoever may not even look."""
    role = role_of(user)
    return None if role is None else (user.get_username(), role)


def staff(request: HttpRequest) -> Authorized:
    """Who makes this request, by the project's own login."""
    return authorized(request.user)
