"""People at terminals of their own: real programs in real terminals, and what is on the screen."""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tests.waiting import wait_until


class Screens:
    """Terminals of a tmux server of our own; each is named."""

    def __init__(self, folder: Path, patience_s: float = 60.0) -> None:
        self._folder = folder
        self._s = patience_s

    def tmux(self, *arguments: str) -> str:
        argv = ["tmux", "-u", "-f", "/dev/null", "-S", str(self._folder / ".socket"), *arguments]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    def open(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        columns: int = 80,
        lines: int = 24,
    ) -> None:
        """Start a program on a new screen, which stays after its end."""
        size = ["-x", str(columns), "-y", str(lines)]
        variables = [f"{key}={value}" for key, value in (env or {}).items()]
        inside = ["env", "-u", "TMUX", "-u", "TMUX_PANE", *variables, *argv]
        # tmux does not always notice how a program ends.
        watched = ["sh", "-c", '"$@"; echo $? > "$0"', str(self._code(name)), *inside]
        stays = ["start-server", ";", "set-option", "-g", "remain-on-exit", "on", ";"]
        self.tmux(*stays, "new-session", "-d", "-s", name, *size, *watched)
        self.tmux("set-option", "-t", name, "status", "off")

    def types(self, name: str, *keys: str) -> None:
        """Press keys, as tmux names them: ``C-c``, ``Enter``; other texts are typed."""
        self.tmux("send-keys", "-t", name, *keys)

    def resize(self, name: str, columns: int, lines: int) -> None:
        self.tmux("resize-window", "-t", name, "-x", str(columns), "-y", str(lines))

    def text(self, name: str) -> str:
        """What is on the screen now."""
        return self.tmux("capture-pane", "-p", "-t", name)

    def sees(self, name: str, text: str) -> str:
        """Wait until it is on the screen; all that is there then."""
        seen = [""]

        def there() -> bool:
            seen[0] = self.text(name)
            return text in seen[0]

        try:
            wait_until(there, self._s)
        except AssertionError as error:
            raise AssertionError(f"{text!r} is not on {name}:\n{seen[0]}") from error
        return seen[0]

    def kill(self, name: str) -> None:
        """End the program as a lost machine would."""
        shell = int(self.tmux("display-message", "-p", "-t", name, "#{pane_pid}"))
        for child in psutil.Process(shell).children():
            child.kill()

    def exit_code(self, name: str) -> int:
        """Wait for the program's end."""
        wait_until(lambda: self._code(name).exists() and self._code(name).read_text(), self._s)
        return int(self._code(name).read_text())

    def _code(self, name: str) -> Path:
        return self._folder / name

    def modes(self, name: str) -> str:
        """What the terminal was left as: alternate screen, mouse."""
        asked = "#{alternate_on} #{mouse_any_flag}"
        return self.tmux("display-message", "-p", "-t", name, asked).strip()


@contextlib.contextmanager
def screens(patience_s: float = 60.0) -> Iterator[Screens]:
    """Gone afterwards, with all that runs on them."""
    with tempfile.TemporaryDirectory(prefix="vms-") as folder:
        found = Screens(Path(folder), patience_s)
        try:
            yield found
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):
                found.tmux("kill-server")
