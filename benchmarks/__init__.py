"""Benchmarks: each measures, emits data and asserts nothing; run with python -m benchmarks.NAME."""
