"""A run by a schedule, with exclusions and weights that are set: the same run, wherever it is resumed."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from midepoch import CheckpointMismatchError, Phase, Schedule

Sources = dict[str, midepoch.Dataset]
Run = Callable[[Sources, Schedule | None], midepoch.Dataset]

ROWS = {"web": 600, "code": 300, "math": 20}
BY_ROWS = Schedule(
    [
        Phase("warm-up", {"web": 1}, steps=6, global_batch_size=12),
        Phase("main", {"web": 0.7, "code": 0.3}, steps=10, global_batch_size=24),
        Phase("anneal", steps=8, final_weights={"code": 0.5, "math": 0.5}),
    ],
    max_passes={"math": 2},
)
LENGTHS = (16, 32, 64)
BY_TOKENS = replace(
    BY_ROWS,
    phases=[replace(phase, sequence_length=length) for phase, length in zip(BY_ROWS.phases, LENGTHS, strict=True)],
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Documents whose tokens name them: token t of row r of source s is s·10⁸ + r·10³ + t."""
    generator, found = np.random.default_rng(0), {}
    for number, (name, rows) in enumerate(ROWS.items(), 1):
        path = tmp_path_factory.mktemp("sources") / f"{name}.parquet"
        lengths = generator.integers(5, 60, rows)
        documents = [number * 10**8 + row * 10**3 + np.arange(length) for row, length in enumerate(lengths)]
        table = pa.table({"input_ids": documents, "id": [document[0] for document in documents]})
        pq.write_table(table, path, row_group_size=64)
        found[name] = midepoch.from_files(path).shuffle(seed=number)
    return found


def rows(sources: Sources, schedule: Schedule | None = None) -> midepoch.Dataset:
    return midepoch.mix(sources, schedule or BY_ROWS, seed=3).select_columns("id")


def filtered(sources: Sources, schedule: Schedule | None = None) -> midepoch.Dataset:
    kept = {name: ds.filter(lambda row: row["id"] % 7000 != 0) for name, ds in sources.items()}
    return rows(kept, schedule).with_lanes(6)


def packed(sources: Sources, schedule: Schedule | None = None) -> midepoch.Dataset:
    return midepoch.mix(sources, schedule or BY_TOKENS, seed=3).pack(eos=7).select_columns("input_ids").with_lanes(6)


RUNS: dict[str, Run] = {"rows": rows, "filtered": filtered, "packed": packed}


def source_of(number: int) -> str:
    return list(ROWS)[number // 10**8 - 1]


class Ranks:
    """The loaders of all ranks, and what a script does at some steps: it sets weights, and excludes steps."""

    def __init__(self, dataset: midepoch.Dataset, size: int, states: Any, *, acts: bool) -> None:
        self._loaders = [dataset.loader(rank=rank, world_size=size, last_batch="uneven") for rank in range(size)]
        self._acts = acts
        if states is not None:
            for loader in self._loaders:
                loader.load_state_dict(states)
        elif acts:
            self._act()

    def _act(self) -> None:
        for loader in self._loaders:
            if loader.steps == 8:
                loader.set_weights({"web": 0.2, "code": 0.8})
            if loader.steps == 9:
                loader.exclude(steps=[11, 13])

    def steps(self, count: int) -> Iterator[list[Any]]:
        """Yield the global batches, each sorted: which rank has which row depends on the number of ranks."""
        passes = [iter(loader) for loader in self._loaders]
        for _ in range(count):
            batches = [next(batches, None) for batches in passes]
            found = [tuple(np.ravel(row).tolist()) for batch in batches if batch for row in next(iter(batch.values()))]
            if not found:
                return
            if self._acts:
                self._act()
            yield sorted(found)

    @property
    def states(self) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = json.loads(json.dumps([loader.state_dict() for loader in self._loaders]))
        return states


def whole(dataset: midepoch.Dataset, *, acts: bool = False) -> list[list[Any]]:
    return list(Ranks(dataset, 1, None, acts=acts).steps(1000))


def check_resumes(run: Run, sources: Sources, trials: int, seed: int) -> int:
    """Kill and resume runs at random steps, on random numbers of ranks. Return how often."""
    expected, generator, kills = whole(run(sources, None), acts=True), random.Random(seed), 0
    while kills < trials:
        delivered: list[list[Any]] = []
        states = None
        while len(delivered) < len(expected):
            ranks = Ranks(run(sources, None), generator.choice([1, 2, 3, 4, 6, 12]), states, acts=True)
            delivered += ranks.steps(generator.randint(1, 9))
            states, kills = ranks.states, kills + 1
        assert delivered == expected
    return kills


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_changed_weights_and_an_excluded_range_resumes_on_any_number_of_ranks(
    name: str, sources: Sources
) -> None:
    assert check_resumes(RUNS[name], sources, 4, seed=1) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes_at_200_random_steps(name: str, sources: Sources) -> None:
    assert check_resumes(RUNS[name], sources, 200, seed=2) >= 200


def test_phases_have_their_steps_sizes_weights_and_limits(sources: Sources) -> None:
    steps = whole(rows(sources))
    assert [len(step) for step in steps] == [12] * 6 + [24] * 18
    counts = [
        Counter(source_of(number) for step in part for (number,) in step)
        for part in (steps[:6], steps[6:16], steps[16:])
    ]
    assert counts[0] == {"web": 72}
    assert counts[1] == {"web": 168, "code": 72}
    # Of the linear phase, a half of the change, and of math no more than its two passes.
    assert counts[2]["math"] == 40
    every = Counter(number for step in steps for (number,) in step if source_of(number) == "math")
    assert set(every.values()) == {2} and len(every) == ROWS["math"]


def test_tokens_are_cut_again_where_the_sequence_length_changes(sources: Sources) -> None:
    sequences = [
        row for batch in packed(sources).with_lanes(1).with_format("numpy").loader() for row in batch["input_ids"]
    ]
    assert [len(row) for row in sequences] == [16] * 72 + [32] * 240 + [64] * 192
    stream = np.concatenate(sequences)
    starts = np.flatnonzero(np.append(True, stream[:-1] == 7))
    for start, stop in zip(starts, [*starts[1:], len(stream)], strict=True):
        document = stream[start:stop]
        document = document[document != 7]
        assert (document == document[0] + np.arange(len(document))).all() and document[0] % 1000 == 0


def test_excluded_steps_are_those_and_no_others(sources: Sources) -> None:
    steps = whole(rows(sources))
    loader = rows(sources).loader()
    assert loader.exclude(steps=range(11, 15)) == 4 * 24
    delivered = [sorted((int(number),) for number in batch["id"]) for batch in loader]
    assert delivered == steps[:10] + steps[14:] and loader.steps == len(delivered)


def test_weights_that_are_set_apply_from_the_next_batch_to_the_end_of_the_phase(sources: Sources) -> None:
    loader = rows(sources).loader()
    passing = iter(loader)
    before = [next(passing) for _ in range(8)]
    assert loader.phase == "main" and loader.weights == {"web": 0.7, "code": 0.3, "math": 0.0}
    loader.set_weights({"math": 1, "code": 1})
    assert loader.weights == {"web": 0.0, "code": 0.5, "math": 0.5}
    after = [Counter(source_of(int(number)) for number in batch["id"]) for batch in passing]
    assert len(before) + len(after) == 24
    assert sum(after[:8], Counter()) == {"code": 152, "math": 40}  # math has two passes
    assert after[8]["web"] > 0  # the next phase has its own weights
    assert epoch_ids(loader) == epoch_ids(rows(sources).loader(), epoch=1)  # and so has that phase in the next epoch


def epoch_ids(loader: Any, epoch: int | None = None) -> list[list[int]]:
    if epoch is not None:
        loader.set_epoch(epoch)
    return [batch["id"].tolist() for batch in loader]


@pytest.mark.parametrize("stop", ["all", "never"])
def test_weights_that_are_set_are_replayed_on_resume(stop: str, sources: Sources) -> None:
    def made() -> Any:
        mix = midepoch.mix(sources, {"web": 6, "code": 3, "math": 1}, seed=2, stop=stop)
        return mix.pack(32).with_lanes(2).loader(6)

    def taken(loader: Any, count: int) -> list[Any]:
        return [next(loader)["input_ids"].tolist() for _ in range(count)]

    loader = made()
    taken(loader, 5)
    for weights in ([1, 1, 1], [0.5, 0.25, 0.25]):
        loader.set_weights(weights)
        taken(loader, 2)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = taken(loader, 12)
    resumed = made()
    resumed.load_state_dict(state)
    assert resumed.weights == {"web": 0.5, "code": 0.25, "math": 0.25}
    assert taken(resumed, 12) == expected


def test_weights_of_the_script_apply_again_when_they_are_changed(
    sources: Sources, caplog: pytest.LogCaptureFixture
) -> None:
    loader = midepoch.mix(sources, [1, 1, 1], stop="never").loader(6)
    next(loader)
    loader.set_weights([1, 0, 0])
    next(loader)
    changed = midepoch.mix(sources, [0, 1, 0], stop="never").loader(6)
    with caplog.at_level(logging.WARNING, "midepoch"):
        changed.load_state_dict(loader.state_dict())
    assert "another mix" in caplog.text
    assert {source_of(int(number)) for number in next(changed)["id"]} == {"code"}


def test_weights_that_are_set_stay_if_another_phase_is_changed_at_a_resume(sources: Sources) -> None:
    loader = rows(sources).loader()
    for _ in range(8):
        next(loader)
    loader.set_weights({"math": 1, "code": 1})
    next(loader)
    state, rest = loader.state_dict(), [next(loader)["id"].tolist() for _ in range(7)]
    warm_up, main, anneal = BY_ROWS.phases
    edited = rows(sources, replace(BY_ROWS, phases=[warm_up, main, replace(anneal, steps=3)])).loader()
    edited.load_state_dict(state)
    assert [next(edited)["id"].tolist() for _ in range(7)] == rest
    own = rows(sources, replace(BY_ROWS, phases=[warm_up, replace(main, weights={"web": 1}), anneal])).loader()
    own.load_state_dict(state)
    assert own.weights == {"web": 1, "code": 0, "math": 0}
    assert {source_of(int(number)) for number in next(own)["id"]} == {"web"}


def test_the_future_of_a_schedule_may_be_changed_at_a_resume(sources: Sources) -> None:
    steps = whole(rows(sources))
    warm_up, main, anneal = BY_ROWS.phases
    ranks = Ranks(rows(sources), 2, None, acts=False)
    assert list(ranks.steps(9)) == steps[:9]
    later = replace(BY_ROWS, phases=[warm_up, main, replace(anneal, final_weights={"math": 1}, steps=3)])
    rest = list(Ranks(rows(sources, later), 3, ranks.states, acts=False).steps(100))
    assert rest[:7] == steps[9:16] and len(rest) == 10
    now = replace(BY_ROWS, phases=[warm_up, replace(main, weights={"code": 1}), anneal])
    rest = list(Ranks(rows(sources, now), 1, ranks.states, acts=False).steps(7))
    assert {source_of(number) for step in rest for (number,) in step} == {"code"}


def test_the_state_of_a_mix_without_a_schedule_is_refused(sources: Sources) -> None:
    loader = midepoch.mix(sources, [1, 1, 1], seed=3, stop="never").select_columns("id").loader(12)
    next(loader)
    with pytest.raises(CheckpointMismatchError, match="pipeline"):
        rows(sources).loader().load_state_dict(loader.state_dict())


@pytest.mark.parametrize("allow", [[], ["pipeline"]])
def test_a_position_in_another_unit_is_refused(allow: list[str], sources: Sources) -> None:
    by_rows = Schedule([Phase("a", {"web": 1}, rows=50), Phase("b", {"web": 1, "code": 1, "math": 1}, rows=60)])
    makers: dict[str, Callable[[], Any]] = {
        "rows": lambda: midepoch.mix(sources, by_rows, seed=3).pack(64, pad=0).loader(4),
        "tokens": lambda: packed(sources, BY_TOKENS).loader(),
        "weights": lambda: midepoch.mix(sources, [1, 1, 1], seed=3, stop="never").pack(64, pad=0).loader(4),
    }
    states = {}
    for name, make in makers.items():
        loader = make()
        next(loader)
        states[name] = loader.state_dict()
    for saved, state in states.items():
        for name, make in makers.items():
            loader = make()
            if name == saved:
                loader.load_state_dict(state, allow=allow)
                continue
            with pytest.raises(CheckpointMismatchError, match=r"in another unit\. This cannot be allowed"):
                loader.load_state_dict(state, allow=allow)


def test_a_mix_whose_sources_have_had_their_passes_ends_with_a_warning(
    sources: Sources, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = Schedule([Phase("only", {"math": 1}, rows=1000)], max_passes={"math": 3})
    with caplog.at_level(logging.WARNING, "midepoch"):
        numbers = [int(number) for batch in rows(sources, schedule).loader(7) for number in batch["id"]]
    assert set(Counter(numbers).values()) == {3} and len(set(numbers)) == 20
    assert "'only'" in caplog.text


def test_an_open_phase_continues_without_an_end(sources: Sources) -> None:
    schedule = Schedule([Phase("first", {"web": 1}, rows=10), Phase("rest", {"code": 1})])
    loader = rows(sources, schedule).loader(10)
    batches = [next(loader)["id"].tolist() for _ in range(90)]
    assert {source_of(number) for number in batches[0]} == {"web"}
    assert Counter(chain.from_iterable(batches[1:])).most_common(1)[0][1] == 3  # 890 rows of 300


def test_a_source_that_ends_with_its_phase_ends_there_after_a_resume_too(sources: Sources) -> None:
    tokens = int(np.sum(sources["math"].lengths("input_ids")))
    schedule = Schedule(
        [Phase("first", {"math": 1}, tokens=tokens), Phase("then", {"math": 1, "web": 1, "code": 1}, tokens=2000)],
        max_passes={"math": 1},
    )

    def made() -> Any:
        mix = midepoch.mix(sources, schedule, seed=4, length="input_ids")
        return mix.loader(4, collate_fn=lambda rows: [int(row["id"]) for row in rows])

    expected = list(made())
    for step in range(len(expected)):
        loader = made()
        delivered = [next(loader) for _ in range(step)]
        resumed = made()
        resumed.load_state_dict(loader.state_dict())
        assert [*delivered, *resumed] == expected


def test_phases_in_rows_without_a_source_that_has_ended_are_the_same_after_a_resume(sources: Sources) -> None:
    schedule = Schedule(
        [
            Phase("first", {"math": 1}, rows=20),
            Phase("then", {"math": 1e6, "web": 1, "code": 1}, rows=20),  # its first draw finds that math has ended
            Phase("last", {"math": 1, "web": 1, "code": 1}, rows=20),
        ],
        max_passes={"math": 1},
    )
    expected = [batch["id"].tolist() for batch in rows(sources, schedule).loader(4)]
    assert [source_of(number) for number in chain(*expected)].count("math") == 20
    for step in range(len(expected)):
        loader = rows(sources, schedule).loader(4)
        delivered = [next(loader)["id"].tolist() for _ in range(step)]
        resumed = rows(sources, schedule).loader(4)
        resumed.load_state_dict(loader.state_dict())
        assert [*delivered, *(batch["id"].tolist() for batch in resumed)] == expected


WRONG: dict[str, tuple[Callable[[Sources], Any], str]] = {
    "no names": (lambda s: midepoch.mix(list(s.values()), BY_ROWS), "sources by name"),
    "unknown source": (
        lambda s: midepoch.mix({"web": s["web"]}, BY_ROWS),
        r"weights for code, math, but the sources are web\. Add the missing source, or",
    ),
    "path": (lambda s: midepoch.mix(s, "run.yaml"), r"got 'run.yaml'\. Read a file with Schedule.load"),
    "dict": (lambda s: midepoch.mix(s, {"phases": []}), r"For a schedule, pass Schedule.from_dict"),
    "stop": (lambda s: midepoch.mix(s, BY_ROWS, stop="all"), "has its own end"),
    "not divisible": (lambda s: rows(s).loader(rank=0, world_size=5), "12 rows cannot be divided equally among 5"),
    "another batch size": (lambda s: rows(s).loader(8), "Omit batch_size"),
    "filter after the mix": (lambda s: rows(s).filter(lambda row: True).loader(), "before they are mixed"),
    "length": (lambda s: packed(s, BY_ROWS), "no sequence_length"),
    "best fit": (lambda s: midepoch.mix(s, BY_TOKENS).pack(strategy="best_fit"), "strategy='concat'"),
    "no batch size": (
        lambda s: rows(s, Schedule([Phase("only", {"web": 1}, rows=5)])).loader(),
        "no global_batch_size",
    ),
    "two lengths in a batch": (
        lambda s: packed(
            s, Schedule([Phase(n, {"web": 1}, tokens=99, sequence_length=len(n)) for n in ["a", "bc"]])
        ).loader(4),
        "could have sequences of two of them",
    ),
    "sizes of unknown steps": (
        lambda _: Schedule([Phase(n, {"web": 1}, tokens=9, global_batch_size=len(n)) for n in ["a", "bc"]]).batch_sizes(
            1
        ),
        "the step at which it ends is not known",
    ),
    "max_tokens": (
        lambda s: midepoch.mix(s, BY_ROWS).loader(max_tokens=99, length="input_ids"),
        "has a global_batch_size",
    ),
    "steps without a size": (lambda _: Schedule([Phase("a", {"web": 1}, steps=5)]), "give it a global_batch_size"),
    "two lengths": (lambda _: Phase("a", {"web": 1}, steps=5, rows=3), "in one of them"),
    "no tokens": (
        lambda s: next(midepoch.mix(s, Schedule([Phase("a", {"web": 1}, tokens=50)])).loader(2)),
        "Call pack",
    ),
    "set_weights without a mix": (lambda s: s["web"].loader(2).set_weights([1]), "is not a mix of sources. Make one"),
    "set_weights of an unknown source": (lambda s: rows(s).loader().set_weights({"wbe": 1}), "no source 'wbe'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_schedules_say_what_to_do(case: str, sources: Sources) -> None:
    make, message = WRONG[case]
    with pytest.raises((TypeError, ValueError), match=message):
        make(sources)


@pytest.mark.parametrize("change", [{"steps": 3}, {"steps": 40}, {"global_batch_size": 2}], ids=str)
def test_a_phase_that_is_over_cannot_become_longer_or_shorter(change: dict[str, int]) -> None:
    sources = {name: midepoch.from_dict({"id": list(range(20))}).shuffle(seed=1) for name in ("web", "code")}
    phases = [
        Phase("first", {"web": 1, "code": 1}, steps=4, global_batch_size=4),
        Phase("second", {"web": 1}, steps=6, global_batch_size=4),
    ]
    loader = midepoch.mix(sources, Schedule(phases), seed=1).loader()
    for _ in range(7):
        next(loader)
    changed = midepoch.mix(sources, Schedule([replace(phases[0], **change), phases[1]]), seed=1).loader()
    with pytest.raises(midepoch.CheckpointMismatchError, match="phases that are over cannot change"):
        changed.load_state_dict(loader.state_dict())
    later = midepoch.mix(sources, Schedule([phases[0], replace(phases[1], steps=9)]), seed=1).loader()
    later.load_state_dict(loader.state_dict())
    assert len(list(later)) == 6
