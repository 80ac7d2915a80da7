"""assert_resumes_exactly finds what a resume loses, as far as it is told to look."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from midepoch.testing import assert_resumes_exactly


class LosesSeven:
    """The numbers from 0 to 9 in each epoch. After a resume, 7 is lost."""

    def __init__(self) -> None:
        self.at, self.resumed = 0, False

    def __iter__(self) -> Iterator[int]:
        while self.at < 10:
            self.at += 1
            if self.at != 8 or not self.resumed:
                yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.resumed = state["at"] % 10, True


@pytest.mark.parametrize("steps", [{2: 4}, {0: 5, 3: 2}, {9: 1}])
def test_a_loss_after_the_tail_of_each_moment_is_not_looked_for(steps: dict[int, int | None]) -> None:
    assert assert_resumes_exactly(LosesSeven, steps=steps, epochs=1) == 2 * len(steps)


@pytest.mark.parametrize("steps", [None, [2], {2: None}, {2: 6}, {0: 5, 3: 5}, {0: 5, 6: 2}])
def test_a_loss_within_the_tail_of_a_moment_is_found(steps: Any) -> None:
    with pytest.raises(AssertionError, match="differs"):
        assert_resumes_exactly(LosesSeven, steps=steps, epochs=1)
