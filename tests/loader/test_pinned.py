"""What is pinned of a batch, told by objects that say so; tests/gpu has the same with real pages."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest

import midepoch
from midepoch.loader.movers import pinned


class Part:
    """Like a tensor, or a batch of the user's own: it pins itself."""

    def __init__(self, done: bool = False) -> None:
        self.done = done

    def pin_memory(self) -> Part:
        return Part(done=True)


class Pair(NamedTuple):
    x: Any
    label: Any


class Fixed(UserDict):  # type: ignore[type-arg]
    def __init__(self) -> None:
        super().__init__(x=Part())


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (Part(), lambda value: value),
        ({"x": Part()}, lambda value: value["x"]),
        (OrderedDict(x=[Part()]), lambda value: value["x"][0]),
        (UserDict(x=Part()), lambda value: value["x"]),  # as a tokenizer's encoding is one
        (Pair(Part(), 3), lambda value: value.x),
        ((1, {"deep": (Part(),)}), lambda value: value[1]["deep"][0]),
    ],
)
def test_every_part_is_pinned_and_containers_keep_their_type(value: Any, part: Any) -> None:
    found = pinned(value)
    assert type(found) is type(value)
    assert part(found).done and not part(value).done


def test_what_has_no_pages_stays_as_it_is() -> None:
    batch = {"text": ["a", "b"], "n": 3, "none": None}
    assert pinned(batch) == batch
    assert pinned(Fixed())["x"].done, "a mapping that cannot be made of a dict becomes one"


def test_without_a_gpu_it_says_so(small_files: list[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.warns(UserWarning, match="no GPU was found"):
        next(iter(midepoch.from_files(small_files).loader(4, pin_memory=True)))
