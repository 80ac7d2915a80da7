"""Scripts with and without JAX, forked from processes that have imported what these need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forks import MIDEPOCH, Forks


@pytest.fixture(scope="session")
def plain_forks() -> Iterator[Forks]:
    """Runs scripts that use neither torch nor JAX."""
    with Forks("numpy.ma", "numpy.random", "midepoch.open", "midepoch.loader", "midepoch.checkpoint") as forks:
        yield forks


@pytest.fixture(scope="session")
def store_forks() -> Iterator[Forks]:
    """Runs scripts that save into an object store. What talks to it is imported by each: it starts threads."""
    with Forks("numpy.random", "midepoch.loader", "midepoch.checkpoint") as forks:
        yield forks


@pytest.fixture(scope="session")
def jax_forks() -> Iterator[Forks]:
    """Runs scripts that use JAX and Orbax, which take 3 s to import. JAX has no thread until its first array."""
    pytest.importorskip("orbax.checkpoint")
    with Forks("numpy.random", "flax.nnx", "orbax.checkpoint", "midepoch.checkpoint.orbax", *MIDEPOCH) as forks:
        yield forks
