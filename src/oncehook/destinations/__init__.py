"""Destinations of events: a Python handler, an HTTP address, or a WhatsApp API."""
