from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from conftest import numbered, write_arrow
from midepoch.errors import CheckpointMismatchError, StateError

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def ds(small_files: list[str]) -> midepoch.Dataset:
    return midepoch.from_files(small_files)


def test_is_small_flat_and_json(ds: midepoch.Dataset) -> None:
    for source in (ds.shuffle(seed=2**63).map(len).select(list(range(37))), ds.shuffle(seed=1).loader(4)):
        state = source.state_dict()
        text = json.dumps(state)
        assert len(text) < 1000
        assert json.loads(text) == state
        assert all(isinstance(value, (int, str, type(None))) for value in state.values())


def mismatches(ds: midepoch.Dataset, tmp_path: Path) -> dict[str, tuple[midepoch.Dataset, str]]:
    other = midepoch.from_files(write_arrow(tmp_path / "other.arrow", numbered(1000, 1037), 4))
    return {
        "data": (other.shuffle(seed=1), "contents"),
        "rows": (ds.take(36).shuffle(seed=1), "slice"),
        "selection": (ds.select(list(range(37))[::-1]).shuffle(seed=1), "select"),
        "scope": (ds, "scope"),
        "seed": (ds.shuffle(seed=2), "another seed"),
        "pipeline": (ds.shuffle(seed=1).map(len), "a map or another step was added"),
    }


@pytest.mark.parametrize("field", ["data", "rows", "selection", "scope", "seed", "pipeline"])
@pytest.mark.parametrize("loader", [False, True])
def test_what_does_not_belong_is_refused(ds: midepoch.Dataset, tmp_path: Path, field: str, loader: bool) -> None:
    saved = ds.shuffle(seed=1)
    state = {**saved.state_dict(), "position": 8}
    target, cause = mismatches(ds, tmp_path)[field]
    found: Any = target.loader(4) if loader else target
    before = found.state_dict()
    with pytest.raises(CheckpointMismatchError, match=cause) as raised:
        found.load_state_dict(state)
    assert raised.value.field == field
    assert raised.value.saved == state[field]
    assert raised.value.current == before[field]
    assert found.state_dict() == before  # unchanged


def test_windows_must_agree(ds: midepoch.Dataset) -> None:
    with pytest.raises(CheckpointMismatchError, match="window"):
        ds.shuffle(seed=1, scope="window", window=3).load_state_dict(
            ds.shuffle(seed=1, scope="window", window=2).state_dict()
        )


@pytest.mark.parametrize(
    "change",
    [
        {"position": -1},
        {"position": 38},
        {"position": "3"},
        {"position": 1.5},
        {"position": True},
        {"position": None},
        {"epoch": None},
        {"lanes": 0},
        {"data": 5},
        {"rows": "37"},
        {"midepoch": None},
        {"midepoch": "1"},
    ],
)
def test_damaged_fields(ds: midepoch.Dataset, change: dict[str, Any]) -> None:
    before = ds.state_dict()
    with pytest.raises(StateError):
        ds.load_state_dict({**before, **change})
    assert ds.state_dict() == before


@pytest.mark.parametrize("name", ["position", "epoch", "data", "seed", "lanes", "pipeline"])
def test_missing_fields(ds: midepoch.Dataset, name: str) -> None:
    state = ds.state_dict()
    del state[name]
    with pytest.raises(StateError, match=f"{name!r} is missing"):
        ds.load_state_dict(state)


@pytest.mark.parametrize("garbage", [None, 5, "state", [], b"x", {}, {"epoch": 1}, {"model": 1, "step": 2}])
def test_garbage(ds: midepoch.Dataset, garbage: Any) -> None:
    for target in (ds, ds.loader(4)):
        with pytest.raises(StateError):
            target.load_state_dict(garbage)


def test_newer_version(ds: midepoch.Dataset) -> None:
    with pytest.raises(StateError, match="version 2.*Upgrade"):
        ds.load_state_dict({**ds.state_dict(), "midepoch": 2})


def test_unknown_fields_are_no_obstacle(ds: midepoch.Dataset) -> None:
    ds.load_state_dict({**ds.state_dict(), "position": 3, "comment": "mine"})
    assert ds[3] == next(iter(ds))


def test_moved_data_is_not_other_data(ds: midepoch.Dataset, small_files: list[str], tmp_path: Path) -> None:
    import shutil

    moved = [shutil.copy(path, tmp_path / f"x{i}.arrow") for i, path in enumerate(small_files)]
    target = midepoch.from_files(moved).shuffle(seed=1)
    target.load_state_dict({**ds.shuffle(seed=1).state_dict(), "position": 30})
    assert list(target) == list(ds.shuffle(seed=1))[30:]


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("state-v*.json")), ids=lambda path: path.stem)
def test_every_released_version_is_accepted(path: Path, tmp_path: Path) -> None:
    """Fixtures are never changed: each was written by the version in its name, for the data made here."""
    fixture = json.loads(path.read_text())
    data = write_arrow(tmp_path / "a.arrow", numbered(0, 37), 4)
    ds = midepoch.from_files(data).shuffle(seed=42, scope="window", window=2)
    state = {**fixture["state"], "data": ds.state_dict()["data"]}  # pyarrow's bytes may change with its version
    ds.load_state_dict(state)
    assert [row["id"] for row in ds] == fixture["rest"]


@pytest.mark.parametrize("stream", [False, True])
def test_settings_that_were_not_given_are_taken_over(tmp_path: Path, stream: bool) -> None:
    """The default scope and window depend on the format and the cache: a resume keeps those of the run."""
    table = pa.table({"id": range(600)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)

    def make(**options: Any) -> Any:
        shuffle = {name: options.pop(name) for name in ("scope", "window", "seed") if name in options}
        ds = midepoch.from_files(tmp_path / "a.parquet", index_dir=tmp_path / "ix", **options)
        ds = ds.shuffle(**{"seed": 1, **shuffle})
        return (ds.filter(lambda row: True) if stream else ds).loader(16)

    first = make(cache_bytes=2000)
    iterator = iter(first)
    seen = [next(iterator)["id"].tolist() for _ in range(5)]
    state, rest = first.state_dict(), [batch["id"].tolist() for batch in iterator]
    assert state["window"] != make().state_dict()["window"]
    for others in ({}, {"scope": "window"}, {"window": state["window"]}):
        again = make(**others)
        again.load_state_dict(state)
        assert [batch["id"].tolist() for batch in again] == rest
    assert sorted(sum(seen + rest, [])) == list(range(600))
    for others in ({"window": 3}, {"scope": "rows"}, {"seed": 2}):
        with pytest.raises(CheckpointMismatchError, match="window|scope|seed"):
            make(**others).load_state_dict(state)
