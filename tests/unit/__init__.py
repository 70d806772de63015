"""Pure code only: no process, no socket; `conftest.py` enforces it."""
