"""A task that uses its guest up: its end is named, and the guest still hands its work back."""

from collections.abc import Callable

from tests.repositories import Repository
from tests.sandboxes import State

MakeRepository = Callable[..., Repository]

EAT_MEMORY = "kept = []\nwhile True: kept.append(bytearray(b'x' * (1 << 20)))"


def test_a_task_that_fills_the_memory_is_named(
    shared_state: State, make_repository: MakeRepository
) -> None:
    project = make_repository()
    answer = shared_state("run", "--json", "--", "python3", "-c", EAT_MEMORY, cwd=project.path)
    assert (answer.code, answer.data["outcome"]) == (137, "guest_oom")
    assert answer.data["result"]["digest"]
