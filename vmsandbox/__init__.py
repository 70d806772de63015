"""One VM per coding agent: a git worktree goes in, one reviewed change set comes out."""

__version__ = "0.1.0"
