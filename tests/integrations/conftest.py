"""Scripts of frameworks, forked from a process that has imported all of them."""

from __future__ import annotations

import pytest

import launch
from forks import Forks
from launch import Program


@pytest.fixture(params=["forked", pytest.param("started", marks=pytest.mark.slow)])
def program(request: pytest.FixtureRequest, framework_forks: Forks) -> Program:
    """Runs a script alone or as ranks, and tells how it ended."""
    return launch.program if request.param == "started" else framework_forks.program
