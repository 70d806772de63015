"""Owns importing paramiko without what is never asked of it: the rest of this room takes it from
here.

paramiko's reader of ssh_config imports ``invoke`` if it is there, for ``Match exec`` alone. That is
a third of the time that importing it takes and 6 MiB in every manager.
"""

import sys
from types import ModuleType

_left_out = "invoke" not in sys.modules
_modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
if _left_out:
    _modules["invoke"] = None  # Python's way to say that there is no such module
try:
    import paramiko
finally:
    if _left_out:
        del sys.modules["invoke"]

__all__ = ["paramiko"]
