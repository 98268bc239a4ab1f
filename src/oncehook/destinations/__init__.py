"""Where events are sent: a Python handler, an HTTP address, or a WhatsApp API. Each makes one attempt and says how
it went."""
