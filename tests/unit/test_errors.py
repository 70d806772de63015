"""Errors keep what they say wherever they travel, and their exit codes never move."""

import pickle

import pytest

from vmsandbox.errors import (
    GuestProblem,
    HostProblem,
    NegativeAnswer,
    ReviewRefused,
    UsageProblem,
    VmsandboxError,
)


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [
        (NegativeAnswer, 1),
        (UsageProblem, 2),
        (HostProblem, 3),
        (GuestProblem, 4),
        (ReviewRefused, 5),
    ],
)
def test_exit_codes_are_a_contract(kind: type[VmsandboxError], exit_code: int) -> None:
    assert kind("some_code", "what failed").exit_code == exit_code


@pytest.mark.parametrize(
    "kind", [NegativeAnswer, UsageProblem, HostProblem, GuestProblem, ReviewRefused]
)
def test_an_error_survives_a_process_border(kind: type[VmsandboxError]) -> None:
    error = kind("disk_full", "no space on /x", hint="free 3 GiB", evidence="/x/console.log")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert vars(copy) == vars(error)
    assert str(copy) == "no space on /x"
