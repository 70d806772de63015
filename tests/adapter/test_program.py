"""How the program's process ends."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading, time
from vmsandbox.cli import program
threading.Thread(target=time.sleep, args=(600,)).start()
sys.argv[1:] = {words}
program()
"""


@pytest.mark.parametrize(
    ("words", "code", "says"), [(["--version"], 0, "vmsandbox "), (["review", "-x"], 2, "review")]
)
def test_the_process_waits_for_no_thread(words: list[str], code: int, says: str) -> None:
    """Threads of libraries are in C code then; one such end was a segmentation fault."""
    argv = [sys.executable, "-c", PROGRAM.format(words=words)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert says in done.stdout + done.stderr
