"""Running of seeds, and shrinking of a history that breaks a rule."""

from __future__ import annotations

import gc
import hashlib
import logging
import random
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from alarms import signal_after
from simulation.cluster import Killed
from simulation.history import FindingError, History, folder_in_memory
from simulation.judge import judge
from simulation.plans import Plan, draw
from simulation.site import Site, installed
from simulation.walks import walk

_SHRINK_SECONDS = 6.0
_WALKS = 0.1
"""Share of histories after which a dataset is iterated, too."""
_COLLECT_EVERY = 25
"""Histories between two collections of garbage."""
_LONGEST = 120.0
"""Seconds after which a history hangs without asking the scheduler: others take less than one."""


@dataclass(frozen=True)
class Outcome:
    """Result of a history."""

    plan: Plan
    finding: str
    events: tuple[str, ...]
    struck: bool
    """True if a fault took place."""
    digest: str
    """Of everything that was delivered, and of all faults."""

    def report(self) -> str:
        verdict = self.finding or "all rules hold"
        return "\n".join([str(self.plan), *(f"  {event}" for event in self.events), verdict, f"digest {self.digest}"])


class Simulator:
    """The simulated parts, installed for any number of histories."""

    def __init__(self) -> None:
        self.site = Site()
        self._installed = installed(self.site)
        self._log, self._count = logging.getLogger("midepoch"), 0

    def __enter__(self) -> Simulator:
        self._before = (self._log.level, self._log.propagate)
        self._log.setLevel(logging.ERROR)
        self._log.propagate = False
        self._handler = _Complaints(self.site.complaints)
        self._log.addHandler(self._handler)
        self._installed.__enter__()
        self._hook, sys.unraisablehook = sys.unraisablehook, _report
        self._frozen = gc.get_freeze_count()
        gc.collect()
        gc.freeze()
        gc.disable()  # finalizers run when a reference goes, at the same moment in every run
        return self

    def __exit__(self, *_: object) -> None:
        if not self._frozen:  # what the tests have frozen stays
            gc.unfreeze()
        gc.enable()
        sys.unraisablehook = self._hook
        self._installed.__exit__(None, None, None)
        level, self._log.propagate = self._before
        self._log.setLevel(level)  # not the attribute: loggers below remember what is enabled
        self._log.removeHandler(self._handler)

    def run(self, plan: int | Plan) -> Outcome:
        """Run a history."""
        plan = draw(plan) if isinstance(plan, int) else plan
        finding, self._count = "", self._count + 1
        if not self._count % _COLLECT_EVERY:
            gc.collect()
            gc.freeze()  # what is left is in caches, and is not looked at again
        with folder_in_memory() as folder:
            history = History(plan, self.site, folder)
            try:
                with signal_after(_LONGEST, _hang):
                    history.run()
                    judge(history)
            except FindingError as problem:
                finding = str(problem)
        draws = random.Random(f"walk of {plan.seed}")
        finding = finding or (walk(plan.pipeline, draws) if draws.random() < _WALKS else "")
        text = repr((history.entries, history.events, finding)).replace(str(folder), "")
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return Outcome(plan, finding, tuple(history.events), bool(history.cluster.happened), digest)


def _hang(*_: object) -> None:
    raise FindingError(f"it hangs: {_LONGEST:.0f} s have passed")


class _Complaints(logging.Handler):
    """Errors that the library logs."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append(record.getMessage())


def _report(unraisable: Any) -> None:
    """A fault in a finalizer is ignored by Python, and not worth a message."""
    if not isinstance(unraisable.exc_value, (Killed, KeyboardInterrupt, OSError)):
        sys.__unraisablehook__(unraisable)


def shrink(simulator: Simulator, outcome: Outcome) -> Outcome:
    """Return the outcome of a smaller history that breaks a rule, too."""
    until, best = time.monotonic() + _SHRINK_SECONDS, outcome
    progress = True
    while progress and time.monotonic() < until:
        progress = False
        for smaller in _smaller(best.plan):
            found = simulator.run(smaller)
            if found.finding and time.monotonic() < until:
                best, progress = found, True
                break
    return best


def _smaller(plan: Plan) -> list[Plan]:
    starts, found = plan.starts, []
    for number, start in enumerate(starts):
        others: list[Any] = [starts[:number] + starts[number + 1 :]] if number < len(starts) - 1 else []
        for fault in start.faults:
            kept = tuple(other for other in start.faults if other is not fault)
            others.append((*starts[:number], replace(start, faults=kept), *starts[number + 1 :]))
        if start.world > 1:
            others.append((*starts[:number], replace(start, world=1, faults=_of_rank_0(start)), *starts[number + 1 :]))
        found += [replace(plan, starts=tuple(some)) for some in others]
    found += [
        replace(plan, features=tuple(other for other in plan.features if other != name)) for name in plan.features
    ]
    if plan.epochs > 1:
        found.append(replace(plan, epochs=1))
    return found


def _of_rank_0(start: Any) -> tuple[Any, ...]:
    return tuple(replace(fault, rank=0) for fault in start.faults)
