"""Benchmarks: they start what they compare with, and compare inside one run."""
