"""Any two features of a loader: 105 pairs, each resumed at every step, on other worlds and with other workers.

What is delivered is compared with an uninterrupted run, the rows of all ranks with those of the epoch, and the ledger
with the log. A pair that means nothing is refused with the sentence of the table (``midepoch.loader.options``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import midepoch
from compositions import SCHEDULE, Case, rows_from
from midepoch.audit import Ledger, read_run
from midepoch.loader.options import FEATURES, MEANINGLESS

PAIRS = [pair for pair in combinations(FEATURES, 2) if frozenset(pair) not in MEANINGLESS]


def cases() -> Iterator[Any]:
    for pair in PAIRS:
        fixed = {"set_weights", "schedule", "tokens, planned"} & set(pair)
        for name in ("rows",) if fixed else ("rows", "filter", "window", "mix"):
            if "tokens at run time" in pair and name == "rows" and not fixed:
                continue
            # The default suite has each pair once: half of them over positions, and half over what changes rows.
            number = PAIRS.index(pair)
            in_lanes = number // 2 % 2 or "tokens at run time" in pair
            chosen = fixed or name == (("filter", "window", "mix")[number % 3] if in_lanes else "rows")
            marks = [] if chosen else [pytest.mark.slow]
            yield pytest.param(pair, name, marks=marks, id=f"{pair[0]} × {pair[1]} over {name}")


@pytest.mark.parametrize(("pair", "pipeline"), list(cases()))
def test_two_features(pair: tuple[str, str], pipeline: str, tmp_path: Path) -> None:
    case = Case(pair, pipeline)
    ledger = Ledger(tmp_path / "whole", attempt="1")
    loader = case.make(audit=ledger)
    log, states = [], [loader.state_dict()]
    first = 2 if case.edits else 0
    for batch in case.batches(loader, first) if first else ():
        log.append(batch)
    for edit in case.edits:
        edit(loader)
    edited = loader.state_dict()
    states = [edited]
    for batch in case.batches(loader, 8):
        log.append(batch)
        states.append(loader.state_dict())
    steps = len(log)
    assert loader.steps == steps and steps > first + 1

    # Resumed at every step, with other workers.
    for number, state in enumerate(states[:-1]):
        resumed = case.make(workers=number % 3)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.steps == first + number
        assert list(case.batches(resumed, steps - first - number)) == log[first + number :], f"after step {number}"
        resumed.close()

    # The ledger says what was delivered.
    run = read_run(tmp_path / "whole")
    assert run.exact, (run.problems, run.epochs)
    assert run.steps == steps
    if not run.every[0].in_lanes:
        for number, rows in enumerate(log, 1):
            assert sorted(one.row for one in run.rows_of_step(number)) == sorted(rows)

    # On other worlds: every row of the epoch once, over the union of all ranks.
    if "schedule" in pair or ("steps_per_epoch" in pair and "lease" in pair):
        return
    whole = Counter(row for batch in _to_the_end(case, [edited], 1) for row in batch)
    middle = states[len(states) // 2]
    for world in (2, 3):
        seen = Counter(row for batch in log[first : first + len(states) // 2] for row in batch)
        seen += Counter(row for batch in _to_the_end(case, [middle], world) for row in batch)
        if "last_batch" not in pair and "steps_per_epoch" not in pair and "set_weights" not in pair:
            assert seen == whole, world


def _to_the_end(case: Case, states: list[Any], world: int) -> list[list[int]]:
    """Return the rest of the epoch of the data, of all ranks."""
    plain = Case(tuple(name for name in case.features if name not in ("lease", "steps_per_epoch")), case.pipeline)
    found = []
    for rank in range(world):
        loader = plain.make(rank=rank, world=world)
        loader.load_state_dict(json.loads(json.dumps(states)))
        found += [plain.rows(batch) for batch in loader]
    return found


@pytest.mark.parametrize("pair", [tuple(sorted(pair)) for pair in MEANINGLESS], ids=" × ".join)
def test_what_means_nothing_is_said(pair: tuple[str, str]) -> None:
    tokens = {"tokens, planned", "tokens at run time"} & set(pair)
    reason = MEANINGLESS[frozenset(pair)]
    if "sizes by step" in pair and tokens:
        with pytest.raises(ValueError, match="max_tokens gives the size of a batch") as refused:
            rows_from(0, 8).loader({0: 2, 3: 4}, max_tokens=8, length="length")
        assert reason in str(refused.value)
    elif "micro-batches" in pair:
        from midepoch.integrations.micro_batches import MicroBatches

        with pytest.raises(ValueError, match="each is a micro-batch already"):
            MicroBatches(rows_from(0, 8).loader(max_tokens=8, length="length"), 2)
    elif "sizes by step" in pair:
        with pytest.raises(ValueError, match="Omit batch_size"):
            midepoch.mix({"a": rows_from(0, 14), "b": rows_from(100, 10)}, SCHEDULE, seed=2).loader({0: 2, 3: 4})
    else:  # a mix has no positions: its batches by tokens are formed at run time
        mix = midepoch.mix({"a": rows_from(0, 14), "b": rows_from(100, 10)}, [1, 1], seed=2)
        assert mix.loader(max_tokens=40, length="length").options.planning is None


def table() -> str:
    """Return all pairs as a table in Markdown, with the reasons below it."""
    names = list(FEATURES)
    reasons = list(dict.fromkeys(MEANINGLESS.values()))
    lines = ["| | " + " | ".join(f"{number}" for number in range(1, len(names))) + " |"]
    lines.append("|" + "---|" * len(names))
    for row, name in enumerate(names[1:], 2):
        cells = []
        for column in names[: row - 1]:
            reason = MEANINGLESS.get(frozenset({name, column}))
            cells.append("✓" if reason is None else f"[{'abcdefgh'[reasons.index(reason)]}](#no-meaning)")
        cells += [""] * (len(names) - 1 - len(cells))
        lines.append(f"| {row} {name} | " + " | ".join(cells) + " |")
    notes = [f"- **{'abcdefgh'[number]}**: {reason}" for number, reason in enumerate(reasons)]
    return "\n".join([*lines, "", "## No meaning", "", *notes])


def test_the_page_shows_the_table_of_the_code() -> None:
    page = (Path(__file__).parents[1] / "docs" / "combining.md").read_text()
    assert table() in page
