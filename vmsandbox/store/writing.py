"""Owns how a file of the state folder is written, all of it or nothing, and what it means that this
failed.
"""

import os
import tempfile
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from vmsandbox.errors import HostProblem

_V = TypeVar("_V", bound=BaseModel)


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace `path` by `data`: a reader, or a crash, sees all of the old or all of the new."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise host_problem(error, path) from error


def write_value(path: Path, value: BaseModel) -> None:
    """Write a pydantic value as JSON, atomically."""
    write_atomic(path, value.model_dump_json(indent=1).encode() + b"\n")


def read_value(path: Path, kind: type[_V]) -> _V | None:
    """Read what :func:`write_value` wrote; None if there is no such file.

    Raises HostProblem ``record_broken`` if it does not parse.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise HostProblem(
            "record_broken",
            f"{path.name} cannot be read: {error.error_count()} problems",
            hint="move the file away, or delete the sandbox",
            evidence=str(path),
        ) from error


def host_problem(error: OSError, path: Path) -> HostProblem:
    """What it means that writing at `path` failed: ``host_disk_full`` or ``state_unwritable``."""
    if error.errno in (28, 122):  # ENOSPC, EDQUOT
        return HostProblem(
            "host_disk_full",
            f"no space left while writing {path}",
            hint="vmsandbox cleanup",
            evidence=str(path),
        )
    return HostProblem("state_unwritable", f"cannot write {path}: {error.strerror}")
