"""What tests of this layer share: cases that are ready to be reviewed."""

import itertools
from pathlib import Path

import pytest

from tests.adapter.crafted import BASE, RESULT, Case, Files, Make


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes host folders with a collected result, each with a state of its own."""
    roots = (tmp_path / str(number) for number in itertools.count())

    def make_case(base: Files = BASE, result: Files = RESULT, **options: str) -> Case:
        return Case(next(roots), base, result, **options)

    return make_case
