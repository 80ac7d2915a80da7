"""States, ledgers, indexes and manifests of real pipelines, changed at random: equivalent, or refused by a documented error."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import midepoch
from data import documents, write_arrow, write_parquet
from midepoch.audit import Ledger, read_run
from midepoch.audit.journal import COUNTERS, head_of, records_in
from midepoch.checkpoint import PipelineCheckpoint
from midepoch.checkpoint.manifest import _digest
from midepoch.errors import CheckpointError, DataError, StateError
from test_fault_points import in_time

ROWS = 60
SOME, MANY = 20, 1000
EXAMPLES = [pytest.param(SOME, id="some"), pytest.param(MANY, id="many", marks=pytest.mark.slow)]
JUNK = [None, True, False, -1, 0, 1, 7, 2**31, 2**62, 2**63, 2**70, 0.5, 1e300, "", "x", "3", "0:9", "é" * 50]
JUNK += [[], [[]], [0], [None, None], ["a", 1], {}, {"a": 1}]

Change = tuple[str, int, int, Any]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["drop", "duplicate", "swap", "retype", "resize", "add"]),
        st.integers(0, 10_000),
        st.integers(0, 10_000),
        st.sampled_from(JUNK),
    ),
    min_size=1,
    max_size=3,
)
"""Changes of the structure of a value: what, at which of its places, with which other one, and a new value."""


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all (container, key) of a value of JSON."""
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def changed(value: Any, changes: list[Change]) -> Any:
    """Return a value of JSON with other structure."""
    value = copy.deepcopy(value)
    for what, first, second, new in changes:
        found = list(places(value))
        if not found:
            return value
        (holder, key), (other, other_key) = found[first % len(found)], found[second % len(found)]
        old = holder[key]
        if what == "drop":
            del holder[key]
        elif what == "duplicate" and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(old))
        elif what == "duplicate" or what == "swap":
            holder[key] = copy.deepcopy(other[other_key])
            if what == "swap" and other is not holder[key]:
                other[other_key] = copy.deepcopy(old)
        elif what == "retype":
            number = isinstance(old, int) and second % 2
            holder[key] = old + second % 5 - 2 if number else str(old) if second % 3 else copy.deepcopy(new)
        elif what == "resize" and isinstance(old, (str, list)):
            size = second % (2 * len(old) + 2)
            holder[key] = (old * 3)[:size]
        else:
            holder[key] = copy.deepcopy(new)
    return value


BYTES = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "drop", "duplicate", "swap", "zero", "append"]),
        st.floats(0, 1, exclude_max=True),
        st.floats(0, 1, exclude_max=True),
        st.integers(1, 40),
    ),
    min_size=1,
    max_size=3,
)


def damaged(data: bytes, damages: list[tuple[str, float, float, int]]) -> bytes:
    """Return bytes with other bits, another length, or parts of them elsewhere."""
    for what, first, second, size in damages:
        at, other = int(first * len(data)), int(second * len(data))
        if what == "flip" and data:
            data = data[:at] + bytes([data[at] ^ 1 << size % 8]) + data[at + 1 :]
        elif what == "cut":
            data = data[:at]
        elif what == "drop":
            data = data[:at] + data[at + size :]
        elif what == "duplicate":
            data = data[: at + size] + data[at:]
        elif what == "swap":
            low, high = sorted((at, other))
            if low + size <= high:
                data = data[:low] + data[high : high + size] + data[low + size : high] + data[low : low + size]
        elif what == "zero":
            data = data[:at] + bytes(len(data[at : at + size])) + data[at + size :]
        elif what == "append":
            data += data[at : at + size]
    return data


def search(examples: int, body: Callable[..., None], **strategies: Any) -> None:
    """Call a function with so many examples, each within a time."""

    def timed(**drawn: Any) -> None:
        with in_time(repr(drawn)[:300]):
            body(**drawn)

    settings(max_examples=examples, database=None)(given(**strategies)(timed))()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.CRITICAL, "midepoch")
    for module in ("damage", "stores"):
        monkeypatch.setattr(f"midepoch.storage.{module}.PAUSES", (0.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> midepoch.Dataset:
    folder = tmp_path_factory.mktemp("grammar")
    path = write_arrow(folder / "a.arrow", documents(ROWS), 10, file_format=True)
    return midepoch.from_files(path, index_dir=folder, columns=["id", "tokens"])


def even(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2 == 0)


def some_tokens(row: dict[str, Any]) -> bool:
    return bool(row["tokens"])


PIPELINES: dict[str, Callable[[midepoch.Dataset], midepoch.Dataset]] = {
    "rows": lambda ds: ds.shuffle(seed=1),
    "windows": lambda ds: ds.shuffle(seed=1, scope="window", window=2),
    "filter": lambda ds: ds.shuffle(seed=1).filter(even),
    "pack": lambda ds: ds.shuffle(seed=1).filter(some_tokens).pack(16, column="tokens", pad=-1),
    "mix": lambda ds: midepoch.mix([ds.shuffle(seed=1).take(30), ds.skip(30).filter(even)], weights=[2, 1], seed=3),
    "lanes": lambda ds: ds.shuffle(seed=1).filter(even).with_lanes(4),
}
OF_PLACE = {
    "epoch",
    "position",
    "steps",
    "first",
    "cursor",
    "more",
    "excluded",
    "changes",
    "leased",
    "unit",
    "lanes",
    "parts",
}
"""Fields of a state that say where it is, or of which mix. A state with other ones may be that of another place."""


def batches_of(loader: midepoch.Loader) -> list[Any]:
    return [batch.to_pydict() for batch in loader]


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", PIPELINES)
def test_states(name: str, examples: int, source: midepoch.Dataset) -> None:
    """A changed state is refused, or the rows after it are those of a place in the epoch, each once."""
    ds = PIPELINES[name](source).with_format("arrow")
    loader = ds.loader(4)
    states, tails = [], []
    for _ in range(5):
        states.append(loader.state_dict())
        resumed = ds.loader(4)
        resumed.load_state_dict(states[-1])
        tails.append(batches_of(resumed))
        next(loader)
    units = [repr(unit) for unit in _units(tails[0])]

    def load(number: int, changes: list[Change]) -> None:
        state = changed(states[number], changes)
        loader = ds.loader(4)
        try:
            loader.load_state_dict(state)
            found = batches_of(loader)
        except StateError:
            return
        same_place = all(state.get(key) == states[number].get(key) for key in OF_PLACE)
        if json.dumps(state) == json.dumps(states[number]) or same_place:
            assert found == tails[number], state
        elif name != "pack":  # whose sequences may begin elsewhere
            rows = [repr(unit) for unit in _units(found)]
            assert len(rows) == len(set(rows)) and set(rows) <= set(units), state

    search(examples, load, number=st.integers(0, 4), changes=CHANGES)


def _units(batches: list[Any]) -> Iterator[Any]:
    for batch in batches:
        yield from zip(*batch.values(), strict=True)


@pytest.fixture(scope="module")
def ledgers(source: midepoch.Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of runs of each pipeline, resumed once."""
    root, found = tmp_path_factory.mktemp("ledgers"), {}
    for name, make in PIPELINES.items():
        ds, found[name] = make(source).with_format("arrow"), root / name
        loader = ds.loader(4, audit=Ledger(root / name, attempt="first"))
        for _ in range(3):
            next(loader)
        state = loader.state_dict()
        loader.close()
        loader._ledger._close()
        loader = ds.loader(4, audit=Ledger(root / name, attempt="second"))
        loader.load_state_dict(state)
        list(loader)
        loader.close()
        loader._ledger._close()
        run = read_run(root / name)
        assert run.exact and not run.problems and all(epoch.complete for epoch in run.epochs)
    return found


def read(folder: Path) -> tuple[int, bool]:
    """Read a ledger with all that it proves. Return its steps, and True if it proves a complete epoch."""
    run = read_run(folder)
    proven = bool(run.epochs) and all(epoch.complete for epoch in run.epochs) and not run.problems and run.exact
    for step in range(1, min(run.steps, 20) + 1):
        with suppress(StateError, DataError):
            run.rows_of_step(step)
    return run.steps, proven


def in_copy(folder: Path, name: str, data: bytes, look: Callable[[Path], None]) -> None:
    """Look at a copy of a folder in which one file has other bytes."""
    copied = folder.with_name(f"{folder.name} changed")
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(folder, copied)
    (copied / name).write_bytes(data)
    look(copied)


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", ["rows", "filter", "pack", "mix"])
def test_damaged_ledgers(name: str, examples: int, ledgers: dict[str, Path]) -> None:
    """Bits, bytes and ends of files: no step more than there was, and nothing is proven that cannot be read."""
    folder = ledgers[name]
    steps, _ = read(folder)
    files = sorted(path.name for path in folder.iterdir())

    def damage(number: int, damages: list[Any]) -> None:
        file = files[number % len(files)]
        before = (folder / file).read_bytes()
        data = damaged(before, damages)

        def look(copied: Path) -> None:
            with suppress(StateError, DataError):
                found, proven = read(copied)
                if file.endswith(".ledger") and not _same_counters(before, data):
                    return  # a counter is not covered by a checksum, as it changes in place
                assert found <= steps and (not proven or found == steps)

        in_copy(folder, file, data, look)

    search(examples, damage, number=st.integers(0, len(files) - 1), damages=BYTES)


def _same_counters(before: bytes, after: bytes) -> bool:
    def counters(data: bytes) -> list[bytes]:
        return [bytes(record.content) for record in records_in(data) if record.kind == COUNTERS]

    return all(some in counters(before) for some in counters(after))


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", ["rows", "filter", "pack", "mix"])
def test_ledgers_with_other_records(name: str, examples: int, ledgers: dict[str, Path]) -> None:
    """Records that are dropped, repeated or swapped, with checksums that fit: only documented errors."""
    folder = ledgers[name]
    files = sorted(path.name for path in folder.glob("*.ledger"))

    def rewrite(number: int, records: list[tuple[str, int, int]]) -> None:
        file = files[number]
        found = [(each.kind, each.number, bytes(each.content)) for each in records_in((folder / file).read_bytes())]
        for what, first, second in records:
            at, other = first % len(found), second % len(found)
            if what == "drop" and len(found) > 1:
                del found[at]
            elif what == "duplicate":
                found.insert(at, found[other])
            elif what == "swap":
                found[at], found[other] = found[other], found[at]

        def look(copied: Path) -> None:
            with suppress(StateError, DataError):
                read(copied)

        in_copy(folder, file, sealed(found), look)

    some = st.lists(st.tuples(st.sampled_from(["drop", "duplicate", "swap"]), st.integers(0, 99), st.integers(0, 99)))
    search(examples, rewrite, number=st.integers(0, len(files) - 1), records=some)


def sealed(records: list[tuple[bytes, int, bytes]]) -> bytes:
    """Return a journal of records."""
    data = b""
    for kind, number, content in records:
        data += head_of(kind, number, content, len(data)) + content
        data += bytes(-len(data) % 8)
    return data


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_damaged_indexes(kind: str, examples: int, tmp_path: Path) -> None:
    """A damaged index is built again."""
    if kind == "arrow":
        path = write_arrow(tmp_path / "data.arrow", documents(ROWS), 10, file_format=True)
    else:
        path = write_parquet(tmp_path / "data.parquet", range(ROWS), 10)
    expected = list(midepoch.from_files(path, index_dir=tmp_path / "index"))
    (index,) = (tmp_path / "index").glob("*.midepoch-index")
    whole = index.read_bytes()

    def damage(damages: list[Any]) -> None:
        index.write_bytes(damaged(whole, damages))
        assert list(midepoch.from_files(path, index_dir=tmp_path / "index")) == expected
        index.unlink()

    search(examples, damage, damages=BYTES)


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("is_sealed", [False, True])
def test_manifests(is_sealed: bool, examples: int, source: midepoch.Dataset, tmp_path: Path) -> None:
    """A step whose manifest differs is passed over or refused. What is restored is that of its step."""
    ds, tails = source.shuffle(seed=1).with_format("arrow"), {}
    loader = ds.loader(4)
    for step in (1, 2):
        next(loader)
        PipelineCheckpoint(tmp_path / "whole").save(loader, step=step, metadata={"loss": 0.5})
        fresh = ds.loader(4)
        fresh.load_state_dict(loader.state_dict())
        tails[step] = batches_of(fresh)
    (manifest,) = (tmp_path / "whole" / "step_2").rglob("manifest.json")
    content = json.loads(manifest.read_bytes())
    assert content["sha256"] == _digest({name: value for name, value in content.items() if name != "sha256"})

    def look(copied: Path) -> None:
        loader = ds.loader(4)
        with suppress(CheckpointError, StateError):
            step = PipelineCheckpoint(copied).restore_latest(loader)
            assert step in (1, 2) and batches_of(loader) == tails[step]
        with suppress(CheckpointError, StateError):
            checkpoint = PipelineCheckpoint(copied)
            checkpoint.verify(2)
            checkpoint.restore(loader, step=2)
            assert batches_of(loader) == tails[2]

    name = str(manifest.relative_to(tmp_path / "whole"))

    def change(changes: list[Change], damages: list[Any]) -> None:
        found = changed(content, changes)
        if is_sealed and isinstance(found, dict):
            found.pop("sha256", None)
            found["sha256"] = _digest(found)
        data = json.dumps(found).encode()
        in_copy(tmp_path / "whole", name, data if is_sealed else damaged(data, damages), look)

    search(examples, change, changes=CHANGES, damages=BYTES)
