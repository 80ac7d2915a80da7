from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midepoch.sources.splits import apportion, parse_split


def bound(percent: bool) -> st.SearchStrategy[str]:
    return st.one_of(
        st.just(""), st.integers(-100, 100).map(str) if not percent else st.integers(-100, 100).map(lambda n: f"{n}%")
    )


@st.composite
def notations(draw: st.DrawFn) -> str:
    terms = []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(["train", "test", "validation.a"]))
        percent = draw(st.booleans())
        terms.append(name if draw(st.booleans()) else f"{name}[{draw(bound(percent))}:{draw(bound(percent))}]")
    return draw(st.sampled_from(["+", " + "])).join(terms)


@given(notations(), st.integers(0, 300), st.integers(0, 300))
@settings(max_examples=400)
def test_means_what_datasets_means(text: str, train: int, test: int) -> None:
    from datasets.arrow_reader import ReadInstruction

    lengths = {"train": train, "test": test, "validation.a": 7}
    expected = [
        (i.splitname, i.from_, max(i.from_, i.to)) for i in ReadInstruction.from_spec(text).to_absolute(lengths)
    ]
    assert [(part.split, *part.rows(lengths[part.split])) for part in parse_split(text)] == expected


def test_whole_percents() -> None:
    (part,) = parse_split("train[:5%](pct1_dropremainder)")
    assert part.rows(250) == (0, 10)
    with pytest.raises(ValueError, match="at least 100"):
        part.rows(99)


@pytest.mark.parametrize(
    "text", ["", "train[", "train[5]", "train[1:2:3]", "train+", "train[:5%](up)", "tr ain", "train[:101%]"]
)
def test_what_is_no_split(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read the split"):
        parse_split(text)


@given(st.lists(st.integers(0, 50), min_size=1).filter(any), st.floats(0, 1))
def test_shares_are_exact_to_a_row(counts: list[int], part: float) -> None:
    total = int(part * sum(counts))
    shares = apportion(counts, total)
    assert sum(shares) == total
    for share, count in zip(shares, counts, strict=True):
        assert abs(share - count * total / sum(counts)) < 1 and share <= count
