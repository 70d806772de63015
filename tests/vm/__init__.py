"""Whole lives of real guests on the built image; emulation (TCG) is enough."""
