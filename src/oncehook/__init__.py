"""The webhook inbox for Python: every event accepted once, worked in order, never lost, always replayable."""

__version__ = "0.1.0"
