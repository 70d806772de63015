"""The keys with which a person leaves a terminal: how they are spelled and found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmsandbox.errors import UsageProblem
from vmsandbox.guest import DETACH_KEYS, detach_bytes
from vmsandbox.guest.marks import overlap


def test_keys_are_spelled_as_docker_does() -> None:
    assert detach_bytes(DETACH_KEYS) == b"\x10\x11"
    assert detach_bytes("ctrl-],d") == b"\x1dd"
    assert detach_bytes("ctrl-\\") == b"\x1c"
    assert detach_bytes("ctrl-@") == b"\0"


@pytest.mark.parametrize("keys", ["", "ctrl-", "ctrl-p,", "ctrl-1", "alt-x", "ctrl-P", "pq"])
def test_what_is_no_key_is_refused(keys: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        detach_bytes(keys)
    assert caught.value.code == "detach_keys_invalid"
    assert DETACH_KEYS in str(caught.value.hint)


@given(st.binary(max_size=12), st.binary(min_size=1, max_size=4))
def test_what_may_be_the_beginning_of_a_mark_is_held_back_and_no_more(
    data: bytes, mark: bytes
) -> None:
    held = overlap(data, mark)
    assert mark.startswith(data[len(data) - held :])
    longer = [size for size in range(held + 1, len(mark)) if data.endswith(mark[:size])]
    assert not longer
