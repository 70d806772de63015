"""Owns mmdebstrap: its command line, its life as a process, and what its output says about
progress.

The root file system comes as a tar stream on its stdout; nothing of it is written by anyone else.
As root mmdebstrap uses chroot, for everybody else a user namespace (``--mode=unshare``), which
needs newuidmap and a range in /etc/subuid.
"""

import contextlib
import io
import os
import re
import signal
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from vmsandbox.images.programs import failure, locate
from vmsandbox.images.recipe import Layer, Recipe

Progress = Callable[[str, float | None], None]
"""Called with what is being done and the share done, 0 to 1, or None where unknown."""

MIRROR = "VMSANDBOX_MIRROR"
"""Environment variable with the URL that packages are fetched from, in place of ``scheme://host``
in a recipe.
"""

CLEAN_UP_S = 60.0
"""How long mmdebstrap may take to remove its files after it was told to stop."""

_PHASES = (
    ("I: running apt-get update", "reading package lists", 0.02),
    ("I: downloading packages", "downloading packages", 0.1),
    ("I: extracting archives", "extracting the base system", 0.2),
    ("I: installing essential", "installing the base system", 0.25),
    ("I: installing remaining", "installing packages", 0.4),
    ("I: running --customize-hook", "finishing the system", 0.9),
    ("I: creating tarball", "packing the system", 0.95),
)
_STEP = re.compile(r"Unpacking |Setting up ")
_NEWLY = re.compile(r"(\d+) newly installed")
_ERROR = re.compile(r"E: |dpkg: error|.*No space left on device")

_LOOK_EVERY_S = 0.1

_GROUP = """
exec 3<&0
trap 'trap : TERM; kill -TERM 0; wait' TERM
"$@" <&3 3<&- &
wait $!
"""
"""Passes a death signal on to all that mmdebstrap started: alone it would wait for them."""

_OURS = ".vmsandbox"
_MERGED_USR = "/usr/share/mmdebstrap/hooks/merged-usr"
_DPKG = (
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "force-unsafe-io",
)
_HOST_APT = re.compile(
    r'^(Acquire::(?:https?::.*|Check-Valid-Until|Check-Date|Retries|ForceIPv4)) "(.*)";$', re.M
)
_URI_HOST = re.compile(r"(?<=\s)https?://[^/\s]+")


def sources(recipe: Recipe, mirror: str | None) -> str:
    """The recipe's sources, fetched from `mirror` if there is one."""
    return _URI_HOST.sub(mirror.rstrip("/"), recipe.sources) if mirror else recipe.sources


def argv(
    recipe: Recipe,
    layers: Sequence[Path],
    *,
    root: bool,
    apt: Sequence[str] = (),
    preferences: Path | None = None,
) -> list[str]:
    """The command that writes the root file system to stdout and reads sources from stdin.

    `layers` are tar files made by :func:`layer_tar`, one for each layer; `apt` are lines of apt
    configuration; `preferences` is a file of apt_preferences(5).
    """
    include = ",".join(("usr-is-merged", *recipe.packages))
    return [
        "mmdebstrap",
        "--verbose",
        f"--mode={'root' if root else 'unshare'}",
        "--variant=apt",
        "--format=tar",
        "--architectures=amd64",
        f"--hook-dir={_MERGED_USR}",
        '--aptopt=APT::Install-Recommends "false"',
        *(f"--aptopt={line}" for line in apt),
        *(f"--dpkgopt={line}" for line in _DPKG),
        f"--include={include}",
        *(_pinning(preferences) if preferences else ()),
        *(
            hook
            for layer, tar in zip(recipe.layers, layers, strict=True)
            for hook in _hooks(layer, tar)
        ),
        recipe.suite,
        "-",
        "-",
    ]


def _pinning(preferences: Path) -> Iterator[str]:
    """Before apt chooses anything; the image does not keep it, see ``tree.LEFT_OUT``."""
    yield '--setup-hook=mkdir -p "$1/etc/apt/preferences.d"'
    yield f"--setup-hook=upload {preferences} /etc/apt/preferences.d/0000recipe"


def _hooks(layer: Layer, tar: Path) -> Iterator[str]:
    yield f"--customize-hook=tar-in {tar} /"
    if layer.finish:
        yield f'--customize-hook=chroot "$1" /{_OURS}/finish'
        yield f'--customize-hook=rm -r "$1/{_OURS}"'


def layer_tar(layer: Layer, epoch: int) -> bytes:
    """A layer's files and finish script as a tar, owned by root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, mode, data in _layer_files(layer):
            member = tarfile.TarInfo(path)
            member.mode, member.size, member.mtime = mode, len(data), epoch
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _layer_files(layer: Layer) -> Iterator[tuple[str, int, bytes]]:
    for file in layer.files:
        yield file.path, file.mode, file.content
    if layer.finish:
        yield f"{_OURS}/finish", 0o755, layer.finish


def host_apt_options(dump: str) -> list[str]:
    """From the output of ``apt-config dump``: how this host reaches its mirrors (proxies, clock
    rules).
    """
    return [f'{name} "{value}"' for name, value in _HOST_APT.findall(dump)]


def environment(recipe: Recipe, epoch: int) -> dict[str, str]:
    """SOURCE_DATE_EPOCH makes every tool in the build use one date; INITRD stops an initramfs that
    nobody would use.
    """
    own = {"SOURCE_DATE_EPOCH": str(epoch), "LC_ALL": "C.UTF-8"}
    return {**os.environ, **own} | ({"INITRD": "No"} if recipe.initramfs else {})


@contextlib.contextmanager
def running(
    command: Sequence[str], source_list: str, env: dict[str, str], log: Path, progress: Progress
) -> Iterator[IO[bytes]]:
    """mmdebstrap's stdout. On the way out it has ended and cleaned up after itself; a failure is
    raised.

    It runs in a process group of its own, so that Ctrl-C reaches it once and through us, and under
    a death signal, so that it also cleans up when we are killed.
    """
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [locate("setpriv"), "--pdeathsig", "TERM", "sh", "-c", _GROUP, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,  # no pipe: it would break if we were killed, in the midst of cleaning up
            env=env,
            process_group=0,
        )
    assert process.stdin
    assert process.stdout
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(source_list.encode())
        with _following(log, progress):
            yield process.stdout
    except tarfile.TarError:
        pass  # the stream broke off; the log says why
    except BaseException:
        _end(process)
        raise
    finally:
        process.stdout.close()
        code = process.wait()
    if code:
        raise failure("mmdebstrap", code, _last_words(log), str(log))


@contextlib.contextmanager
def _following(log: Path, progress: Progress) -> Iterator[None]:
    """Report what the log says while it grows."""
    ended = threading.Event()
    follower = threading.Thread(target=_follow, args=(log, ended, progress), daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


def _follow(log: Path, ended: threading.Event, progress: Progress) -> None:
    phases, rest = Phases(), ""
    with log.open(errors="replace") as file:
        while not ended.wait(_LOOK_EVERY_S):
            *lines, rest = (rest + file.read()).split("\n")
            for line in lines:
                if news := phases.read(line):
                    progress(*news)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Tell it to clean up and go; the last resort is to kill it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(CLEAN_UP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _last_words(log: Path) -> str:
    """What mmdebstrap or apt called an error, the first one last; else the end of the log."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if _ERROR.match(line)]
    return "\n".join(reversed(errors) if errors else lines[-5:])


class Phases:
    """Turns lines of mmdebstrap's log into progress, as good as the log allows."""

    def __init__(self) -> None:
        self._text, self._from, self._to = "starting", 0.0, _PHASES[0][2]
        self._expected = self._seen = 0

    def read(self, line: str) -> tuple[str, float] | None:
        """What is being done and the share done, if this line changed it."""
        for number, (start, text, share) in enumerate(_PHASES):
            if line.startswith(start) and share > self._from:
                self._text, self._from, self._seen = text, share, 0
                self._to = _PHASES[number + 1][2] if number + 1 < len(_PHASES) else 1.0
                return text, share
        if new := _NEWLY.search(line):
            self._expected = int(new[1])
        elif _STEP.match(line) and self._expected:
            self._seen += 1
            # Every package is unpacked and then set up.
            within = min(1.0, self._seen / (2 * self._expected))
            return self._text, self._from + (self._to - self._from) * within
        return None
