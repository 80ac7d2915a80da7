"""Mutation of ledgers: of the records of a clean run, one is dropped, swapped, changed, cut, mixed or forged.

The audit must not call such a run proven: it is found if the audit accuses it, refuses to read it, or shows an epoch that
is not complete or has other numbers than the log.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from midepoch.audit import read_run
from midepoch.audit.journal import COUNTERS, head_of, records_in
from midepoch.audit.records import HEADER
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


class Stored(NamedTuple):
    """A record as it is stored: its head, and its content."""

    kind: bytes
    number: int
    content: bytes

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a header."""
        fields: dict[str, Any] = json.loads(self.content)
        return fields

    def with_fields(self, **fields: Any) -> Stored:
        """Return a header with other fields."""
        return self._replace(content=json.dumps({**self.fields, **fields}).encode())

    def counted(self, more: int) -> Stored:
        """Return counters with more steps."""
        steps = int.from_bytes(self.content[:8], "little") + more
        return self._replace(content=max(0, steps).to_bytes(8, "little") + self.content[8:])


def _records(path: Path) -> list[Stored]:
    return [Stored(one.kind, one.number, bytes(one.content)) for one in records_in(path.read_bytes())]


def _write(path: Path, records: list[Stored], *, is_cut: bool = False) -> None:
    data = bytearray()
    for kind, number, content in records:
        data += head_of(kind, number, content, len(data)) + content + bytes(-len(content) % 8)
    path.write_bytes(data if is_cut else data + bytes(16))  # as a process that was killed leaves it


def _of_kind(records: list[Stored], kind: bytes) -> list[int]:
    return [number for number, record in enumerate(records) if record.kind == kind]


def drop(records: list[Stored], draws: random.Random) -> None:
    """Count a step less."""
    number = draws.choice(_of_kind(records, COUNTERS))
    records[number] = records[number].counted(-1)


def forge(records: list[Stored], draws: random.Random) -> None:
    """Count a step more."""
    number = draws.choice(_of_kind(records, COUNTERS))
    records[number] = records[number].counted(1)


def weigh(records: list[Stored], draws: random.Random) -> None:
    """Change the batch size of a pass."""
    number = draws.choice(_of_kind(records, HEADER))
    size, *others = records[number].fields["batching"]
    records[number] = records[number].with_fields(batching=[str(int(size) + 1), *others])


def move(records: list[Stored], draws: random.Random) -> None:
    """Change the step at which a pass begins."""
    number = draws.choice(_of_kind(records, HEADER))
    epoch, steps, lanes = records[number].fields["cursor"]
    records[number] = records[number].with_fields(cursor=[epoch, steps + 1, lanes])


def swap(records: list[Stored], draws: random.Random) -> None:
    """Exchange the headers of two passes."""
    one, other = draws.sample(_of_kind(records, HEADER), 2)
    records[one], records[other] = records[other], records[one]


def cut(records: list[Stored], draws: random.Random) -> None:
    """Leave out the end of the file."""
    del records[draws.randrange(len(records)) :]


MUTATIONS = {function.__name__: function for function in (drop, forge, weigh, move, swap, cut)}


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
                records = [one.with_fields(attempt="start 9") if one.kind == HEADER else one for one in _records(other)]
                _write(target / f"000009-{'0' * 10}{other.name[17:]}", records)
        return target
    records = _records(path)
    before = list(records)
    try:
        MUTATIONS[name](records, draws)
    except (IndexError, ValueError):
        return None
    _write(path, records, is_cut=name == "cut")
    return None if records == before else target
