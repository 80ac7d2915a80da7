from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midepoch.order import Bijection
from midepoch.order.bijection import check_seed, derive


@given(n=st.integers(0, 20_000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**40))
def test_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    images = Bijection(n, derive(seed, epoch, "rows"))(np.arange(n))
    assert np.array_equal(np.sort(images), np.arange(n))


@pytest.mark.parametrize("n", [4095, 4096, 4097, 65_536, 10**6 + 3])
def test_is_a_bijection_across_the_change_of_method(n: int) -> None:
    images = Bijection(n, derive(1, 2, "rows"))(np.arange(n))
    assert np.array_equal(np.bincount(images, minlength=n), np.ones(n))


@given(n=st.integers(2**32, 2**62), start=st.integers(0, 2**31))
def test_stays_within_and_apart_on_huge_domains(n: int, start: int) -> None:
    images = Bijection(n, derive(5, 0, "rows"))(np.arange(start, start + 500))
    assert images.min() >= 0
    assert images.max() < n
    assert len(np.unique(images)) == 500


def test_tables_and_hashing_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(100_000)
    with_tables = Bijection(10**6, derive(1, 0, "rows"))(x)
    monkeypatch.setattr("midepoch.order.bijection._TABLE_LIMIT", 0)
    assert np.array_equal(Bijection(10**6, derive(1, 0, "rows"))(x), with_tables)


@pytest.mark.parametrize("n", [2, 3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_small_permutations_are_equally_likely(n: int) -> None:
    draws = 400 * math.factorial(n)
    counts = Counter(tuple(Bijection(n, derive(s, 0, "rows"))(np.arange(n)).tolist()) for s in range(draws))
    assert len(counts) == math.factorial(n)
    chi2 = sum((count - 400) ** 2 / 400 for count in counts.values())
    freedom = math.factorial(n) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 5


def test_seed_and_epoch_never_collide() -> None:
    keys = {
        tuple(derive(s, e, p, i).tolist())
        for s in range(6)
        for e in range(6)
        for p in ("rows", "map")
        for i in range(3)
    }
    assert len(keys) == 6 * 6 * 2 * 3
    assert not np.array_equal(derive(1, 1, "rows"), derive(2, 0, "rows"))


def test_refuses_what_is_out_of_range() -> None:
    permute = Bijection(10, derive(0, 0, "rows"))
    with pytest.raises(IndexError, match=r"in \[0, 10\)"):
        permute(np.array([10]))
    with pytest.raises(IndexError):
        permute(np.array([-1]))
    with pytest.raises(ValueError, match="negative"):
        Bijection(-1, derive(0, 0, "rows"))


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_refuses_seeds_out_of_range(seed: int) -> None:
    with pytest.raises(ValueError, match="seed"):
        check_seed(seed)


@pytest.mark.parametrize("seed", [1.5, "7", True, None])
def test_refuses_seeds_that_are_no_whole_numbers(seed: object) -> None:
    with pytest.raises(TypeError, match="seed"):
        check_seed(seed)  # type: ignore[arg-type]
