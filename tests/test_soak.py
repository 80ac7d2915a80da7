"""Random pipelines, resumed at random moments. A few by default; `-m slow` for hundreds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import midepoch
from midepoch.testing import assert_resumes_exactly
from test_conformance import double, group_sum, noise, not_sevens


def random_pipeline(draw: random.Random, files: list[str]) -> Callable[[], midepoch.Dataset]:
    steps: list[Callable[[midepoch.Dataset], midepoch.Dataset]] = []
    if draw.random() < 0.5:
        a, b = sorted(draw.sample(range(38), 2))
        steps.append(lambda ds: ds.slice(a, max(b, a + 4)))
    if draw.random() < 0.7:
        scope, window, seed = draw.choice(["rows", "window", "files"]), draw.randint(1, 4), draw.randrange(2**64)
        steps.append(lambda ds: ds.shuffle(seed=seed, scope=scope, window=window))
    if draw.random() < 0.4:
        count, mode = draw.randint(1, 3), draw.choice(["auto", "file", "example"])
        index = draw.randrange(count)
        steps.append(lambda ds: ds.shard(count, index, mode=mode))
    for _ in range(draw.randint(0, 3)):
        size = draw.randint(1, 7)
        steps.append(
            draw.choice(
                [
                    lambda ds: ds.map(double),
                    lambda ds, size=size: ds.map(group_sum, batched=True, batch_size=size),
                    lambda ds: ds.map(noise, with_generator=True),
                    lambda ds: ds.map(not_sevens, on_error="skip"),
                    lambda ds: (
                        ds.remove_columns("score") if "score" in ds.schema.names and not ds.pipeline.base.tail else ds
                    ),
                ]
            )
        )
    kind = draw.choice([None, "python", "numpy", "torch", "arrow"])

    def make() -> midepoch.Dataset:
        ds = midepoch.from_files(files)
        for step in steps:
            ds = step(ds)
        return ds.with_format(kind)

    return make


def soak(files: list[str], seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        make = random_pipeline(draw, files)
        options: dict[str, Any] = {"batch_size": draw.randint(1, 9), "drop_last": draw.random() < 0.3}
        workers = draw.choice([0, 0, 0, 1, 2])
        try:
            batches = len(list(make().loader(**options)))
            if batches == 0:
                continue
            moments = sorted(draw.sample(range(2 * batches + 2), min(6, 2 * batches + 2)))
            if draw.random() < 0.3:
                assert_resumes_exactly(make, steps=moments, tail=12)
            else:
                assert_resumes_exactly(
                    lambda: make().loader(**options),  # noqa: B023
                    resume_with=[lambda: make().loader(**options, num_workers=workers)],  # noqa: B023
                    steps=moments,
                    tail=5,
                )
        except AssertionError as problem:
            raise AssertionError(f"seed {seed}: {make()!r}, {options}, {workers} workers") from problem


def test_soak(small_files: list[str]) -> None:
    soak(small_files, range(6))


@pytest.mark.slow
def test_long_soak(small_files: list[str]) -> None:
    soak(small_files, range(6, 600))
