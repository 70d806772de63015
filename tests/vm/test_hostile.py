"""Tasks with root in their guest that mean harm: what they hand back is flagged or refused by name,
and nothing of theirs ever runs on the host or changes its files.
"""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.repositories import Repository, fingerprint
from tests.sandboxes import Answer, State
from tests.vm.lives import Trace, assert_refused, changes_of, fed, status_of


class Victim(NamedTuple):
    """A worktree, and a file outside of it that exists as soon as something of a guest runs on the
    host."""

    state: State
    project: Repository
    proof: Path

    @property
    def make_proof(self) -> str:
        """A command that makes the proof, whatever arguments it is given."""
        return f"touch {self.proof}; :"

    def run(self, script: str, *options: str) -> Answer:
        """A task that runs `script`, in which $PROOF is a command that makes the proof."""
        env = ("--env", f"PROOF={self.make_proof}")
        command = ("sh", "-euxc", script)
        return self.state("run", "--json", *options, *env, "--", *command, cwd=self.project.path)


@pytest.fixture
def victim(shared_state: State, tmp_path: Path) -> Iterator[Victim]:
    files: dict[str, str | bytes] = {
        "README": "hello\n",
        "src/main.c": "int main;\n",
        "vmsandbox.toml": '[result]\nmax_size = "4M"\n',
    }
    project = Repository.create(tmp_path / "project", files)
    proof = Path("/tmp") / f"vmsandbox-proof-{secrets.token_hex(8)}"
    before = fingerprint(project.path, without=frozenset())
    yield Victim(shared_state, project, proof)
    assert not proof.exists()
    assert fingerprint(project.path, without=frozenset()) == before


# --- accepted, but not unseen ---------------------------------------------------------------------

# Everything that git obeys is turned into a command; also in the host's name for the hooks' folder.
ARMED = r"""
git config core.fsmonitor "$PROOF"
git config core.sshCommand "$PROOF"
git config diff.external "$PROOF"
git config filter.x.clean "$PROOF"
git config filter.x.smudge "$PROOF"
git config diff.x.textconv "$PROOF"
printf '* filter=x diff=x\n' > .gitattributes
for hook in pre-commit post-checkout post-merge fsmonitor-watchman; do
    mkdir -p .git/hooks
    printf '#!/bin/sh\n%s\n' "$PROOF" > .git/hooks/$hook
    chmod +x .git/hooks/$hook
done
echo "$PROOF" > .envrc
mkdir -p .vscode .GIT
echo '{}' > .vscode/tasks.json
printf '[core]\nfsmonitor = "%s"\n' "$PROOF" > .GIT/config
printf '#!/bin/sh\n' > tool
sudo chown root tool
sudo chmod 6755 tool
ln -s README link
echo odd > "$(printf 'esc\033[2Jand\nline')"
echo bidi > "$(printf 'a\342\200\256cod.exe')"
head -c 5000 /dev/urandom > blob
git add README
git -c core.fsmonitor= commit -qm "$(printf 'red \033[31m herring')" --allow-empty --no-verify
printf '\033]0;title\007' | tee /dev/stderr
"""
FLAGS = {
    ".gitattributes": {"runs-git"},
    ".envrc": {"runs-shell"},
    ".vscode/tasks.json": {"runs-editor"},
    "tool": {"executable"},
    "link": {"link"},
    r'"esc\033[2Jand\nline"': {"odd-name"},
    r'"a\342\200\256cod.exe"': {"odd-name"},
    "blob": {"binary"},
}

# The guest's root takes apart what the collection works with.
SABOTAGE = r"""
cd "$1"
rm -rf .git
ln -s / .git
for config in /var/lib/vmsandbox/*.git/config /etc/gitconfig /root/.gitconfig; do
    printf '[core]\nfsmonitor = "%s"\nhooksPath = /tmp\n[diff]\nexternal = "%s"\n' "$2" "$2" \
        >> $config
done
echo '* filter=x' >> /var/lib/vmsandbox/collect.git/info/attributes
touch /var/lib/vmsandbox/collect.git/index.lock
echo more > README
"""


def test_an_armed_result_is_flagged_and_harmless(victim: Victim, tmp_path: Path) -> None:
    state = victim.state
    answer = victim.run(ARMED, "--keep", "--name", "armed")
    assert answer.code == 0, answer.err
    found = changes_of(state, "armed")
    assert {path: set(change["flags"]) for path, change in found.items()} == FLAGS
    assert found["tool"]["new_mode"] == "100755"
    for verb in (["review", "--diff"], ["status"], ["logs"], ["logs", "--events"]):
        assert_plain(state.ok(*verb, "armed").out)
    result = state.ok("review", "--json", "armed").data["result"]
    assert [commit["subject"] for commit in result["agent_commits"]] == [r"red \x1b[31m herring"]

    target = tmp_path / "target"
    victim.project.git("clone", "--quiet", ".", str(target))
    state.ok("apply", "--yes", "--target", target, "armed")
    assert (target / "tool").stat().st_mode & 0o7777 == 0o755
    assert sorted(path.name for path in target.iterdir() if path.name.lower() == ".git") == [".git"]

    sabotage = ("exec", "-i", "--root", "armed", "--", "sh", "-eus", victim.project.path)
    done = fed(state, SABOTAGE, *sabotage, victim.make_proof)
    assert done.code == 0, done.err
    state.ok("stop", "armed")
    assert changes_of(state, "armed").keys() == {*FLAGS, "README"}
    state.ok("delete", "armed")


def assert_plain(text: str) -> None:
    """Nothing but characters that a terminal shows as themselves."""
    assert all(character in "\n\t" or character.isprintable() for character in text), repr(text)


# --- refused --------------------------------------------------------------------------------------

# Links that a collection finds on the disk; and, instead of that collection, a script that first
# sends an object of a tebibyte and then names that no disk could hold.
REFUSED = r"""
echo work > work.txt
ln -s /etc/passwd absolute
ln -s ../../outside up
base=$(git rev-parse HEAD)
blob=$(echo x | git hash-object -w --stdin)
folder=$(printf '100644 blob %s\tconfig\n' $blob | git mktree)
for name in .. .GIT $(printf '.g\342\200\214it'); do
    printf '040000 tree %s\t%s\n' $folder $name
done > /tmp/entries
tree=$(git mktree < /tmp/entries)
commit=$(git commit-tree $tree -p $base -m crafted)
echo "vmsandbox-result 1 $commit $tree" > /tmp/crafted
printf '%s\n^%s\n' $commit $base | git pack-objects --revs --stdout --thin -q >> /tmp/crafted
cat > /tmp/collect << 'END'
#!/bin/sh
case "$*" in
    *--without-agent-commits*) exec cat /tmp/crafted ;;
esac
head -n 1 /tmp/crafted
exec python3 -c '
import sys, zlib
stream = zlib.compressobj(0)
sys.stdout.buffer.write(b"PACK\0\0\0\2\0\0\0\1" + bytes([0xb0] + [0x80] * 5 + [2]))
while True:
    sys.stdout.buffer.write(stream.compress(bytes(65536)))
'
END
sudo cp /tmp/collect /usr/lib/vmsandbox/collect
"""


def test_a_hostile_result_is_refused_by_name(victim: Victim) -> None:
    """Once crafted by a collection that is not ours; after a reboot, which brings ours back, as it
    lies on the disk; and what is put right by hand comes in."""
    state = victim.state
    said = assert_refused(victim.run(REFUSED, "--name", "refused"), "result_hostile", 125)
    for path in ("../config", ".GIT/config", r'".g\342\200\214it/config"'):
        assert f"{path}: " in said
    assert_plain(said[said.index("error: ") :])
    assert_nothing_to_apply(state)

    said = assert_refused(state("resume", "--keep", "--json", "refused"), "result_hostile", 125)
    for path in ("absolute: a link", "up: a link"):
        assert path in said
    assert_nothing_to_apply(state)
    found = status_of(state, "refused")
    assert (found["state"], found["failure"]["code"]) == ("failed", "result_hostile")
    assert found["problems"] == [f"its guest still runs: vmsandbox stop {found['id']}"]

    state.ok("exec", "refused", "--", "rm", "absolute", "up")
    state.ok("stop", "refused")
    found = status_of(state, "refused")
    assert (found["state"], found["failure"], found["problems"]) == ("stopped", None, [])
    assert changes_of(state, "refused").keys() == {"work.txt"}
    trace = Trace.of(state, found["id"])
    assert trace.guest() == []
    state.ok("delete", "refused")
    assert trace.everything() == []


def assert_nothing_to_apply(state: State) -> None:
    assert_refused(state("apply", "--json", "--yes", "refused"), "no_result", 1)
    assert "no result was collected" in state.ok("review", "refused").out
