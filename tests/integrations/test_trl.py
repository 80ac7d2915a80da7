"""TRL's trainers, killed and resumed on other numbers of ranks: GRPO trains on each prompt exactly once, SFT and DPO on
the same rows in every step."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import midepoch
from forks import Forks
from midepoch.audit import read_run

# Not imported: its import lists the files of all distributions, 1 s in every test process.
pytestmark = pytest.mark.skipif(not find_spec("trl"), reason="midepoch[trl] is not installed")

JOB = Path(__file__).with_name("trl_job.py")
EXAMPLES = Path(__file__).parents[2] / "examples"


def attempt(forks: Forks, folder: Path, ranks: int = 1, **options: Any) -> None:
    """Run the job. It is killed if it has ``die_at``, and else ends well."""
    command = [str(JOB), str(folder), json.dumps(options)]
    done = forks.world(ranks, *command) if ranks > 1 else forks.run(command)
    said = "\n".join(one.stderr[-3000:] for one in done)
    assert all(one.returncode == (-signal.SIGKILL if "die_at" in options else 0) for one in done), said


def steps_of(path: Path) -> list[tuple[int, list[int]]]:
    """The micro-batches of the run that is in the last model: without steps that were lost with an attempt."""
    steps: list[tuple[int, list[int]]] = []
    for line in path.read_text().splitlines():
        first, *rest = line.split()
        if first == "from":
            steps = [(step, prompts) for step, prompts in steps if step <= int(rest[0])]
        else:
            steps.append((int(first), [int(prompt) for prompt in rest]))
    return steps


def trained(folder: Path) -> Counter[int]:
    """The number of completions by prompt on which the last model was trained, on all ranks."""
    paths = sorted(folder.glob("prompts-*.txt"))
    return Counter(prompt for path in paths for _, prompts in steps_of(path) for prompt in prompts)


def resumed_from(folder: Path) -> list[int]:
    lines = (folder / "prompts-0.txt").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("from")]


@pytest.mark.parametrize(
    ("options", "prompts", "epochs"),
    [
        pytest.param({"steps_per_generation": 4}, 12, 2, id="four steps a generation", marks=pytest.mark.slow),
        pytest.param({"steps_per_generation": 2}, 13, 2, id="an incomplete last generation"),
        pytest.param({"gradient_accumulation_steps": 2}, 9, 1, id="one step a generation", marks=pytest.mark.slow),
        pytest.param(
            {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
            11,
            2,
            id="accumulated",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
            9,
            2,
            id="two generations a step",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_prompt_once_over_kills(
    options: dict[str, Any], prompts: int, epochs: int, framework_forks: Forks, tmp_path: Path
) -> None:
    always = {"per_device_train_batch_size": 4, "num_generations": 4, "save_steps": 1, "num_train_epochs": epochs}
    last = max(2, prompts * epochs // options.get("gradient_accumulation_steps", 1))
    kills = sorted(random.Random(prompts).sample(range(1, last - 1), 2))
    for die_at in kills:
        attempt(framework_forks, tmp_path, **always, **options, prompts=prompts, die_at=die_at)
    attempt(framework_forks, tmp_path, **always, **options, prompts=prompts)
    assert resumed_from(tmp_path) == [0, *kills]
    proofs = [(epoch.exact, epoch.complete) for epoch in read_run(tmp_path / "ledger").epochs]
    assert proofs == [(True, True)] * epochs
    assert trained(tmp_path) == dict.fromkeys(range(prompts), 4 * epochs)


def test_every_prompt_once_on_other_numbers_of_ranks(framework_forks: Forks, tmp_path: Path) -> None:
    always = {"num_generations": 4, "steps_per_generation": 2, "save_steps": 1, "num_train_epochs": 2, "prompts": 22}
    attempt(framework_forks, tmp_path, 1, per_device_train_batch_size=8, die_at=3, **always)
    attempt(framework_forks, tmp_path, 2, per_device_train_batch_size=4, die_at=9, **always)
    attempt(framework_forks, tmp_path, 1, per_device_train_batch_size=8, **always)
    assert resumed_from(tmp_path) == [0, 3, 9]
    assert trained(tmp_path) == dict.fromkeys(range(22), 8)


@pytest.mark.slow
def test_groups_across_ranks(framework_forks: Forks, tmp_path: Path) -> None:
    """Each rank has half of the completions of every prompt, in one step."""
    always = {"num_generations": 8, "gradient_accumulation_steps": 2, "save_steps": 1, "prompts": 7}
    attempt(framework_forks, tmp_path, 2, per_device_train_batch_size=2, num_train_epochs=1, die_at=4, **always)
    attempt(framework_forks, tmp_path, 2, per_device_train_batch_size=2, num_train_epochs=1, **always)
    assert resumed_from(tmp_path) == [0, 4]
    assert trained(tmp_path) == dict.fromkeys(range(7), 8)


def test_iterations_that_were_cut_are_repeated(framework_forks: Forks, tmp_path: Path) -> None:
    """Two iterations over each generation: a kill between them generates again for its prompts, and for no others."""
    always = {"per_device_train_batch_size": 4, "num_generations": 4, "steps_per_generation": 2, "num_iterations": 2}
    always |= {"save_steps": 1, "max_steps": 14, "prompts": 6}
    attempt(framework_forks, tmp_path, die_at=4, **always)  # after both iterations of the first generation
    attempt(framework_forks, tmp_path, die_at=7, **always)  # one prompt of the second has had both, the other one
    attempt(framework_forks, tmp_path, **always)
    assert resumed_from(tmp_path) == [0, 4, 7]
    prompts = [set(prompts) for _, prompts in steps_of(tmp_path / "prompts-0.txt")]
    a, b, c, d, e, f = (prompts[step] for step in (0, 1, 4, 5, 8, 11))
    assert prompts == [a, b, a, b, c, d, c, *(d, e, d, e), *(f, set(), f)]  # the last generation has one prompt
    assert sorted(number for each in (a, b, c, d, e, f) for number in each) == list(range(6))


def test_filtered_prompts(framework_forks: Forks, tmp_path: Path) -> None:
    """A stream of unknown length, by steps, over two epochs."""
    always = {"per_device_train_batch_size": 4, "num_generations": 4, "steps_per_generation": 3, "save_steps": 1}
    always |= {"max_steps": 14, "prompts": 20, "kept": 7}
    attempt(framework_forks, tmp_path, die_at=5, **always)
    attempt(framework_forks, tmp_path, die_at=8, **always)
    attempt(framework_forks, tmp_path, **always)
    assert trained(tmp_path) == dict.fromkeys(range(7), 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps": 3, "steps_per_generation": 2}, "One must be a multiple of the other"),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2, "kept": 7}, "Raise steps_per_generation"),
    ],
)
def test_refused(options: dict[str, Any], message: str, framework_forks: Forks, tmp_path: Path) -> None:
    always = {"per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 2, "prompts": 8}
    (refused,) = framework_forks.run([str(JOB), str(tmp_path), json.dumps(always | options)])
    assert refused.returncode == 1
    assert message in refused.stderr


def test_example(framework_forks: Forks, tmp_path: Path) -> None:
    attempt(framework_forks, tmp_path, example=[str(tmp_path)], die_at=7)
    attempt(framework_forks, tmp_path, ranks=2, example=[str(tmp_path), "--batch", "4"])
    assert resumed_from(tmp_path) == [0, 6]
    assert trained(tmp_path) == dict.fromkeys(range(40), 4)
    (epoch,) = read_run(tmp_path / "ledger").epochs
    assert epoch.exact and epoch.complete and epoch.leases is not None
    assert (epoch.leases.acknowledged, epoch.never, epoch.leases.out) == (40, 0, 0)


def test_rows_are_prepared_as_by_trl(framework_forks: Forks, tmp_path: Path) -> None:
    done = framework_forks.run([str(JOB.with_name("trl_prepared_job.py")), str(tmp_path)])
    assert done[0].returncode == 0, done[0].stderr[-3000:]
    cases = json.loads((tmp_path / "rows.json").read_text())
    for case, (theirs, ours) in cases.items():
        if "bfd" in case:  # the same sequences, in another order
            theirs, ours = (sorted(rows, key=json.dumps) for rows in (theirs, ours))
        assert ours == theirs, case
    assert len(cases["completions"][1]) == len(cases["pairs"][1]) == 2  # nothing is left of the longest prompt
    refused = json.loads((tmp_path / "refusals.json").read_text())
    assert "got a loader" in refused["loader"] and "loader_options" in refused["loader"]
    assert "precompute_ref_log_probs=True reads all rows" in refused["precomputed"]


def global_batches(folder: Path, first: int, last: int) -> list[list[int]]:
    """Sorted rows of steps over all ranks, from the last attempt that made each."""
    steps: dict[int, dict[int, list[int]]] = {}
    for path in folder.glob("rows-*.txt"):
        rank = int(path.stem.removeprefix("rows-"))
        for line in path.read_text().splitlines():
            step, *rows = (int(word) for word in line.split())
            steps.setdefault(step, {})[rank] = rows
    return [sorted(row for rows in steps[step].values() for row in rows) for step in range(first, last + 1)]


@pytest.mark.parametrize(
    ("name", "worlds"),
    [
        ("sft", (2, 1, 4)),
        pytest.param("sft", (4, 2, 8), marks=pytest.mark.slow),
        pytest.param("dpo", (2, 1, 2), marks=pytest.mark.slow),
    ],
)
def test_same_global_batches_on_other_numbers_of_ranks(
    name: str, worlds: tuple[int, ...], framework_forks: Forks, tmp_path: Path
) -> None:
    script, steps, found = str(EXAMPLES / f"{name}_trl.py"), (3, 9, 12), []
    for ranks, first, last in zip(worlds, (1, 3, 9), steps, strict=True):  # a checkpoint every two steps
        die = () if last == steps[-1] else ("--die-at", str(last))
        command = [script, str(tmp_path), *die]
        done = framework_forks.world(ranks, *command) if ranks > 1 else framework_forks.run(command)
        codes = {one.returncode for one in done}
        assert codes == ({-signal.SIGKILL} if die else {0}), done[0].stderr[-3000:]
        found += global_batches(tmp_path, first, last - (last % 2 if die else 0))
        for path in tmp_path.glob("rows-*.txt"):
            path.unlink()
    ds = midepoch.from_files(tmp_path / "data.parquet").shuffle(seed=42)
    ds = ds.map(lambda row: {"id": int(row["prompt"].split()[0])}).with_lanes(worlds[0])  # those of the first ranks
    loader = ds.loader(8, last_batch="drop")
    assert found == [sorted(batch["id"].tolist()) for _ in range(2) for batch in loader]
