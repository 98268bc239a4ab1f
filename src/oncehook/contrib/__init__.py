"""Thin adapters: the inbox inside the frameworks that people already use. Each imports its framework, and only that."""
