"""Waiting for threads to end: an interrupt does not end the thread that is waited for."""

from __future__ import annotations

import signal
import threading

import pytest

from midepoch._internal import processes


def test_a_thread_still_runs_after_an_interrupted_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, daemon=True)
    thread.start()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            processes.join([thread])
    finally:
        signal.signal(signal.SIGALRM, before)
    monkeypatch.setattr(processes, "_PATIENCE", 0.05)
    assert not processes.join([thread])
    stop.set()
    while thread in threading.enumerate():
        pass
    assert processes.join([thread])
