"""Hooks that become Celery tasks."""

import os

from tasks import app as celery

from oncehook import Inbox
from oncehook.contrib.celery import celery_task

inbox = Inbox(os.environ.get("STORE", "sqlite:./oncehook.db"))
inbox.source("invoices", verify="none", key="$.id", subject="$.customer")

celery_task(inbox, "billing.handle_invoice", app=celery, retry="quick")
inbox.route("invoices", "billing.handle_invoice", when={"type": "invoice.*"})
