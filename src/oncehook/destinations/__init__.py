"""Where events are sent: a Python handler or an HTTP address. Each makes one attempt and says how it went."""
