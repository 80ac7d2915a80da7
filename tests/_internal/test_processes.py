"""Processes that are there, that are gone, and that have ended but were not buried."""

from __future__ import annotations

import os

from midepoch._internal.processes import alive, started


def test_one_that_has_ended_is_not_alive_though_its_number_is_taken() -> None:
    assert alive(os.getpid()) and started(os.getpid())
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and stays
    os.kill(child, 0)
    assert not alive(child) and started(child) == ""
    os.waitpid(child, 0)
    assert not alive(child) and started(child) == ""
