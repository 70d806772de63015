"""Owns the reasons to look twice at a change: what it is, and who on the host acts on its name."""

import re
import stat
from collections.abc import Iterator, Mapping

from vmsandbox.hostile.names import fold
from vmsandbox.model import Change
from vmsandbox.text import is_plain

LARGE_BYTES = 1024 * 1024

MEANING: Mapping[str, str] = {
    "executable": "can be executed",
    "link": "a symbolic link",
    "binary": "binary: no lines to read",
    "large": "1 MiB or more",
    "odd-name": "control, bidirectional or otherwise misleading characters in the name",
    "case-collision": "differs from another name only in case or Unicode form",
    "runs-shell": "a shell or environment loader runs it when somebody enters the folder",
    "runs-git": "git, another version control or a hook manager acts on it",
    "runs-ci": "a CI service runs it",
    "runs-editor": "an editor or development environment acts on it when the folder is opened",
    "runs-agent": "steers or runs coding agents on the host",
    "runs-build": "a build or test tool runs it",
    "runs-package": "a package manager or interpreter runs it on install or start",
    "lock-file": "decides which foreign code is installed",
}
"""What each flag means, for people."""


def flags_of(
    change: Change, *, collides: bool = False, in_repository: bool = False
) -> tuple[str, ...]:
    """Reasons to look twice at a change; keys of :data:`MEANING`.

    `in_repository` says that it lies in a folder that git takes for a bare repository: its
    ``config`` names programs, and git runs them for whoever asks anything inside.
    """
    found = dict.fromkeys(_flags(change, collides))
    if in_repository and change.new_oid is not None:
        found["runs-git"] = None
    return tuple(found)


def _flags(change: Change, collides: bool) -> Iterator[str]:
    if _is_odd(change.path):
        yield "odd-name"
    if change.new_oid is None:
        return
    was_executable = stat.S_ISREG(change.old_mode) and change.old_mode & 0o100
    if stat.S_ISLNK(change.new_mode):
        yield "link"
    elif change.new_mode & 0o100 and not was_executable:
        yield "executable"
    if stat.S_ISREG(change.new_mode) and change.added is None and change.size_bytes:
        yield "binary"
    if change.size_bytes >= LARGE_BYTES:
        yield "large"
    if collides:
        yield "case-collision"
    yield from _acted_on(change.path)


def _is_odd(path: bytes) -> bool:
    text = path.decode("utf-8", "surrogateescape")
    parts = path.split(b"/")
    return (
        not all(is_plain(character) for character in text)
        or "\\" in text
        or any(part.startswith((b"-", b" ")) or part.endswith((b" ", b".")) for part in parts)
    )


# --- names that programs on the host act on, all in lower case ------------------------------------

# Base names. They are matched alone (255 bytes at most), so that no pattern meets a long path.
_NAMES: Mapping[str, str] = {
    "runs-shell": r"""\.envrc | \.env(\..+)? | \.direnvrc | \.(ba|z|k|c|tc)?shrc | \.inputrc
        | \.(bash_|z)?profile | \.bash_(login|logout|aliases) | \.zshenv | \.zlogin
        | \.autoenv(\.zsh)? | \.?mise(\..+)?\.toml | \.tool-versions""",
    "runs-git": r"""\.gitattributes | \.gitmodules | \.gitconfig | \.lfsconfig | \.overcommit\.yml
        | \.pre-commit-(config|hooks)\.ya?ml | \.?lefthook(-local)?\.(ya?ml|toml|json)
        | \.(huskyrc|lintstagedrc)(\..+)?""",
    "runs-ci": r"""action\.ya?ml | \.gitlab-ci\.ya?ml | jenkinsfile.* | azure-pipelines.*\.ya?ml
        | \.travis\.ya?ml | \.?appveyor\.ya?ml | \.drone\.(ya?ml|star) | \.woodpecker\.ya?ml
        | bitbucket-pipelines\.ya?ml | cloudbuild\.ya?ml | \.cirrus\.(ya?ml|star)
        | buildspec\.ya?ml | renovate\.json5? | dependabot\.ya?ml | \.readthedocs\.ya?ml""",
    "runs-editor": r"""\.?devcontainer\.json | \.n?vim(rc|\.lua) | \.g?vimrc | \.exrc | \.lvimrc
        | \.dir-locals(-2)?\.el | .+\.(code-workspace|sublime-project) | \.gitpod\.ya?ml
        | \.gdbinit | \.lldbinit""",
    "runs-agent": r"""\.mcp\.json | \.(cursor|windsurf|cline)rules | \.aider\..+
        | (claude|agents|gemini)(\.local)?\.md | copilot-instructions\.md | opencode\.jsonc?""",
    "runs-build": r"""(gnu)?makefile(\..+)? | .+\.mk | cmakelists\.txt | cmakepresets\.json
        | .+\.cmake | meson(_options\.txt|\.build|\.options) | (build|workspace|module)(\.bazel)?
        | \.bazelrc | .+\.bzl | .+\.gradle(\.kts)? | gradlew(\.bat)? | gradle\.properties
        | gradle-wrapper\.(jar|properties) | mvnw(\.cmd)? | pom\.xml | build\.(xml|rs|sbt|zig)
        | rakefile | .+\.rake | \.?justfile | taskfile\.ya?ml | sconstruct | sconscript | wscript
        | configure(\.(ac|in))? | autogen\.sh | (docker|container)file(\..+)? | .+\.dockerfile
        | (docker-)?compose(\..+)?\.ya?ml | vagrantfile | tiltfile | procfile | earthfile
        | conftest\.py | (noxfile|fabfile|dodo|tasks)\.py | tox\.ini | pytest\.ini
        | gulpfile(\..+)?\.[cm]?[jt]s | gruntfile\.[cm]?js | .+\.config\.[cm]?[jt]s
        | \.(eslint|babel|mocha|prettier|stylelint)rc(\..+)? | \.?pylintrc(\.toml)? | mypy\.ini
        | \.flake8 | \.rubocop\.yml | \.rspec | \.luacheckrc | \.(credo|formatter)\.exs
        | \.?latexmkrc | ansible\.cfg | dune(-project)? | (shell|default|flake)\.nix
        | .+\.((cs|fs|vb|vcx)proj|sln|targets|props) | turbo\.json | nx\.json | lerna\.json""",
    "runs-package": r"""package\.json | \.npmrc | \.yarnrc(\.yml)? | \.pnpmfile\.[cm]?js
        | pnpm-workspace\.ya?ml | bunfig\.toml | deno\.jsonc? | setup\.(py|cfg) | pyproject\.toml
        | .*requirements.*\.(txt|in) | constraints.*\.txt | pipfile | \.?pip\.conf | uv\.toml
        | environment\.ya?ml | (site|user)customize\.py | .+\.pth | manage\.py | composer\.json
        | gemfile | .+\.gemspec | cargo\.toml | rust-toolchain(\.toml)? | go\.(mod|work) | mix\.exs
        | rebar\.config | package\.swift | .+\.cabal | stack\.yaml | cabal\.project | setup\.hs
        | project\.clj | deps\.edn | build\.zig\.zon | podfile | pubspec\.ya?ml | nuget\.config
        | global\.json | conanfile\.(py|txt) | vcpkg\.json
        | \.(rprofile|renviron|ghci|irbrc|pryrc|pdbrc|octaverc|erlang) | \.iex\.exs
        | brewfile | devbox\.json | pixi\.toml""",
    "lock-file": r""".+\.lock | .+-lock\.(json|ya?ml) | npm-shrinkwrap\.json | bun\.lockb
        | go\.(work\.)?sum | packages\.lock\.json | gradle\.lockfile | .+\.resolved""",
}

# Folders: everything below one of this name counts.
_FOLDERS: Mapping[str, frozenset[str]] = {
    "runs-shell": frozenset({".ssh", ".direnv"}),
    "runs-git": frozenset(
        {".husky", ".githooks", ".git-hooks", ".lefthook", ".hg", ".jj", ".sl", ".svn", ".bzr"}
    ),
    "runs-ci": frozenset({".circleci", ".buildkite", ".woodpecker", ".tekton", ".ci", ".gitlab"}),
    "runs-editor": frozenset(
        {".vscode", ".idea", ".vs", ".zed", ".fleet", ".devcontainer", ".nova", ".theia"}
    ),
    "runs-agent": frozenset(
        {".claude", ".cursor", ".codex", ".gemini", ".windsurf", ".continue", ".roo", ".opencode"}
    ),
    "runs-build": frozenset({".mvn"}),
    "runs-package": frozenset({".yarn", ".bundle", ".cargo"}),
}

# Folders that count only at the top of the tree.
_TOP_FOLDERS: Mapping[str, tuple[str, ...]] = {
    "runs-git": ("hooks/",),
    "runs-ci": tuple(
        f"{top}/{below}/"
        for top in (".github", ".gitea", ".forgejo")
        for below in ("workflows", "actions")
    ),
    "runs-agent": (".github/instructions/", ".github/prompts/", ".github/chatmodes/"),
}

_NAME_PATTERNS = {flag: re.compile(text, re.VERBOSE | re.DOTALL) for flag, text in _NAMES.items()}


def _acted_on(path: bytes) -> Iterator[str]:
    """Flags of a file that host programs act on by its name alone, whatever its case."""
    text = fold(path).decode("utf-8", "surrogateescape")
    *folders, name = text.split("/")
    for flag, pattern in _NAME_PATTERNS.items():
        if (
            pattern.fullmatch(name)
            or not _FOLDERS.get(flag, frozenset()).isdisjoint(folders)
            or text.startswith(_TOP_FOLDERS.get(flag, ()))
        ):
            yield flag
