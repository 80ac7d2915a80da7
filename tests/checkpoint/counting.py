"""A pipeline of a user's own, as small as can be: it counts."""

from __future__ import annotations


class Numbers:
    def __init__(self, at: int = 0) -> None:
        self.at = at

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]
