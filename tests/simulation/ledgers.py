"""Mutation of ledgers: of the records of a clean run, one is dropped, repeated, swapped, changed, cut, mixed or forged.

The audit must not call such a run proven: it is found if the audit accuses it, refuses to read it, or shows an epoch that
is not complete or has other numbers than the log.
"""

from __future__ import annotations

import random
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from midepoch.audit import read_run
from midepoch.errors import MidepochError
from simulation.history import History, folder_in_memory
from simulation.plans import Exit, Plan, StartPlan
from simulation.running import Simulator

PIPELINES = ("rows", "filter", "pack", "mix")


class Verdict(NamedTuple):
    """Result of the audit: True if nothing is wrong, and by epoch what is proven."""

    exact: bool
    epochs: tuple[tuple[int, int, int, bool], ...]
    steps: int


def verdict(folder: Path) -> Verdict | None:
    """Return what the audit says. None if it refuses to read the ledger."""
    try:
        run = read_run(folder)
        epochs = tuple((one.epoch, one.once, one.steps, one.complete) for one in run.epochs)
        return Verdict(run.exact and not run.problems, epochs, run.steps)
    except MidepochError:
        return None


def plan_of(seed: int) -> Plan:
    """Return a clean run of two starts, with one to three ranks."""
    draws = random.Random(seed)
    shape = draws.choice(((1, 2), (1, 3), (2, 2), (3, 1)))
    starts = (
        StartPlan(*shape, every=1, exit=Exit("preempt", draws.randint(1, 3)), connected=True),
        StartPlan(*shape, every=2, connected=True),
    )
    return Plan(seed, (), draws.choice(PIPELINES), starts, "uneven", False, None, draws.choice((1, 2)), 0)


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().rstrip(b"\0").split(b"\n")


def _records(lines: list[bytes]) -> list[int]:
    return [number for number, line in enumerate(lines) if line and not line.startswith(b"{")]


def drop(lines: list[bytes], draws: random.Random) -> None:
    """Leave out a step."""
    number = draws.choice(_records(lines))
    place = draws.choice([match.start() for match in re.finditer(rb"\.", lines[number])])
    lines[number] = lines[number][:place] + lines[number][place + 1 :]


def repeat(lines: list[bytes], draws: random.Random) -> None:
    """Record a step twice."""
    number = draws.choice(_records(lines))
    place = draws.choice([match.start() for match in re.finditer(rb"\.", lines[number])])
    lines[number] = lines[number][:place] + b"." + lines[number][place:]


def forge(lines: list[bytes], draws: random.Random) -> None:
    """Add a step at the end of a pass."""
    number = draws.choice(_records(lines))
    lines[number] = lines[number].rstrip() + b"."


def weigh(lines: list[bytes], draws: random.Random) -> None:
    """Change the batch size of a pass."""
    number = draws.choice([number for number, line in enumerate(lines) if b'"size":"' in line])
    lines[number] = re.sub(rb'"size":"(\d)', lambda match: b'"size":"%d' % (int(match[1]) + 1), lines[number])


def move(lines: list[bytes], draws: random.Random) -> None:
    """Change the step at which a pass begins."""
    number = draws.choice([number for number, line in enumerate(lines) if b'"steps":' in line])
    lines[number] = re.sub(rb'"steps":(\d+)', lambda match: b'"steps":%d' % (int(match[1]) + 1), lines[number], count=1)


def swap(lines: list[bytes], draws: random.Random) -> None:
    """Exchange the records of two passes, or the headers."""
    headers = [number for number, line in enumerate(lines) if line.startswith(b"{")]
    one, other = draws.sample(headers, 2)
    lines[one], lines[other] = lines[other], lines[one]


def cut(lines: list[bytes], draws: random.Random) -> None:
    """Leave out the end of the file."""
    whole = b"\n".join(lines)
    lines[:] = whole[: draws.randrange(len(whole))].split(b"\n")


MUTATIONS = {function.__name__: function for function in (drop, repeat, forge, weigh, move, swap, cut)}


def audited(simulator: Simulator, seeds: range) -> tuple[int, dict[str, Counter[str]], dict[str, list[int]]]:
    """Return the clean runs that were accused, and by mutation how many were accused, refused, seen and missed."""
    accused, found = 0, {name: Counter[str]() for name in (*MUTATIONS, "remove", "mix")}
    missed: dict[str, list[int]] = {name: [] for name in found}
    for seed in seeds:
        plan = plan_of(seed)
        with folder_in_memory() as folder:
            (folder / "run").mkdir()
            History(plan, simulator.site, folder / "run").run()
            ledger = folder / "run" / "ledger"
            clean = verdict(ledger)
            accused += clean is None or not clean.exact
            for name in found:
                draws = random.Random(seed)
                changed = _changed(name, ledger, folder / name, draws)
                if changed is None:
                    continue
                after = verdict(changed)
                kind = _kind(clean, after)
                found[name][kind] += 1
                if kind == "missed":
                    missed[name].append(seed)
    return accused, found, missed


def _kind(clean: Any, after: Verdict | None) -> str:
    if after is None:
        return "refused"
    return "accused" if not after.exact else "missed" if after == clean else "seen"


def _changed(name: str, ledger: Path, target: Path, draws: random.Random) -> Path | None:
    """Write a changed copy. None if the mutation does not apply, or changes nothing."""
    shutil.copytree(ledger, target)
    files = sorted(target.glob("*.ledger"))
    path = draws.choice(files)
    if name == "remove":
        path.unlink()
        return target
    if name == "mix":  # the records of a start, once more as another start
        for other in files:
            if other.name[:6] == files[0].name[:6]:
                data = other.read_bytes().replace(b'"attempt":"start 0"', b'"attempt":"start 9"')
                (target / f"000009-{'0' * 10}{other.name[17:]}").write_bytes(data)
        return target
    lines = _lines(path)
    before = list(lines)
    try:
        MUTATIONS[name](lines, draws)
    except (IndexError, ValueError):
        return None
    path.write_bytes(b"\n".join(lines))
    return None if lines == before else target
