"""Arrays that a map returns for each row are collected at once: the batches are those of rows kept until the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import midepoch
from midepoch.loader import batches
from midepoch.testing import same
from pairs import alternating

N = 2000
MAKERS: dict[str, Callable[[int], Any]] = {
    "arrays": lambda i: np.full(N, i, np.int32),
    "images": lambda i: np.full((40, 50, 3), i % 251, np.uint8).transpose(2, 0, 1),
    "tensors": lambda i: torch.full((30, 40), i, dtype=torch.float32),
    "transposed tensors": lambda i: torch.full((40, 50, 3), i, dtype=torch.int16).permute(2, 0, 1),
    "bfloat16": lambda i: torch.full((N,), i, dtype=torch.bfloat16),
    "small": lambda i: np.full(3, i),
    "shapes": lambda i: np.full(N + (i == 7), i),
    "late shapes": lambda i: torch.full((N + (i % 5 == 4),), i),
    "types": lambda i: np.full(N, i, np.int32 if i % 5 else np.float64),
    "types of tensors": lambda i: torch.full((N,), i, dtype=torch.int32 if i % 5 else torch.float64),
    "tensors and arrays": lambda i: torch.full((N,), i) if i % 3 else np.full(N, i),
    "nothing": lambda i: None if i % 4 == 3 else np.full(N, i),
    "big-endian": lambda i: np.full(N, i, ">i4"),
    "gradients": lambda i: torch.full((N,), float(i), requires_grad=True),
    "texts": lambda i: np.array(["x" * 500] * 20),
    "numbers": lambda i: i,
}


@pytest.mark.parametrize(("name", "kind"), alternating([*MAKERS], ["torch", "numpy"]))
def test_batches_are_the_same_as_of_rows_kept_apart(
    name: str, kind: str, small_files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, kind) == ("bfloat16", "numpy"):
        pytest.skip("numpy has no such type")
    make = MAKERS[name]
    ds = midepoch.from_files(small_files).select_columns(["id"]).shuffle(seed=1)
    ds = ds.map(lambda row: {"x": make(row["id"]), "twice": 2 * row["id"]}).with_format(kind)
    found = [list(ds.loader(5, num_workers=workers)) for workers in (0, 1)]
    monkeypatch.setattr(batches, "_nowhere", None)
    expected = list(ds.loader(5))
    assert same(found[0], expected)
    assert same(found[1], expected)
    for batch, other in zip(found[0], expected, strict=True):
        assert type(batch["x"]) is type(other["x"])
        assert getattr(batch["x"], "dtype", None) == getattr(other["x"], "dtype", None)


def test_rows_that_fail_leave_no_gap(small_files: list[str]) -> None:
    def fails(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] % 3 == 0:
            raise ValueError("bad")
        return {"x": np.full(N, row["id"])}

    ds = midepoch.from_files(small_files).map(fails, on_error="skip")
    for workers in (0, 2):
        for batch in ds.loader(5, num_workers=workers):
            assert (batch["x"] == batch["id"].reshape(-1, 1)).all()
            assert (batch["id"] % 3 > 0).all()


def test_a_function_may_return_the_same_array_again(small_files: list[str]) -> None:
    array = np.zeros(N, np.int64)

    def fill(row: dict[str, Any]) -> dict[str, Any]:
        array[:] = row["id"]
        return {"x": array}

    for workers in (0, 2):
        for batch in midepoch.from_files(small_files).map(fill).loader(5, num_workers=workers):
            assert (batch["x"] == batch["id"].reshape(-1, 1)).all()
