"""The guard of the unit layer bites: otherwise a green unit layer would say nothing."""

import os
import socket
import subprocess
import sys

import pytest


def test_sockets_are_errors() -> None:
    with pytest.raises(RuntimeError, match="tests/adapter"):
        socket.socket()


def test_processes_are_errors() -> None:
    with pytest.raises(RuntimeError, match="tests/adapter"):
        subprocess.run([sys.executable, "-c", ""], check=False)
    with pytest.raises(RuntimeError, match="tests/adapter"):
        os.system("true")
