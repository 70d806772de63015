"""What each guest of the demo works on: hold port 3000 until told to go on, then write a file."""

import pathlib
import socket
import sys
import time

name = sys.argv[1]
server = socket.create_server(("", 3000))
print(f"{name} listens on port 3000 of {socket.gethostname()}", flush=True)
deadline = time.monotonic() + 600
while not pathlib.Path("/tmp/go").exists() and time.monotonic() < deadline:
    time.sleep(0.1)
pathlib.Path(f"{name}.txt").write_text(f"{name} had port 3000 to itself\n")
