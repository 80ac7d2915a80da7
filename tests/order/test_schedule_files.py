"""Schedules in YAML and JSON files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import midepoch
from characters import ENCODABLE
from midepoch import Phase, Schedule
from midepoch.errors import DataNotFoundError

yaml = pytest.importorskip("yaml")

names = st.text(ENCODABLE, min_size=1, max_size=8) | st.sampled_from(
    ["no", "yes", "null", "1e9", "2024-01-01", "~", "1_0", "on: [", "<<"]
)
weight = st.floats(1e-9, 1e9) | st.integers(1, 10**6) | st.sampled_from([1e-05, 1e16, 0.1])
count = st.integers(1, 2**40)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    sources = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    some = st.dictionaries(st.sampled_from(sources), weight, min_size=1)
    unit = draw(st.sampled_from(["steps", "rows", "tokens"]))
    packed = unit != "rows" and draw(st.booleans())
    phases = []
    for number, name in enumerate(draw(st.lists(names, min_size=1, max_size=4, unique=True))):
        first = number == 0
        phases.append(
            Phase(
                name,
                draw(some) if first else draw(st.none() | some),
                **{unit: draw(count)},
                final_weights=draw(st.none() | some),
                sequence_length=draw(count) if packed and first else draw(st.none() | count) if packed else None,
                global_batch_size=draw(st.integers(1, 4096)) if first else draw(st.none() | st.integers(1, 4096)),
            )
        )
    used = Schedule(phases).names
    return Schedule(
        phases,
        max_passes=draw(st.dictionaries(st.sampled_from(used), count)),
        sources=draw(st.dictionaries(names, names | st.lists(names, min_size=1, max_size=3))),
    )


@settings(max_examples=60, deadline=None)
@given(schedules(), st.sampled_from(["run.yaml", "run.YML", "run.json"]))
def test_a_schedule_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, schedule: Schedule, name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    schedule.save(path)
    again = Schedule.load(path)
    assert again == schedule and again.to_dict() == schedule.to_dict() and again.text == schedule.text
    assert [path.name for path in path.parent.iterdir() if path.name.endswith(".tmp")] == []


WRITTEN = """
# The run of March.
sources:
  web: data/web/*.parquet
  no: [data/no-1.parquet, data/no-2.parquet]
phases:
  - {name: warm-up, weights: {web: 1}, steps: 1_000, sequence_length: 2048, global_batch_size: 256}
  - name: main
    weights: {web: 0.7, no: 0.3}
    tokens: 1e9
  - &last
    name: anneal
    steps: 10
    final_weights: {no: 1}
max_passes: {no: 4}
"""


def test_yaml_as_people_write_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(WRITTEN)
    schedule = Schedule.load(path)
    assert schedule == Schedule(
        [
            Phase("warm-up", {"web": 1}, steps=1000, sequence_length=2048, global_batch_size=256),
            Phase("main", {"web": 0.7, "no": 0.3}, tokens=10**9),
            Phase("anneal", steps=10, final_weights={"no": 1}),
        ],
        max_passes={"no": 4},
        sources={"web": "data/web/*.parquet", "no": ["data/no-1.parquet", "data/no-2.parquet"]},
    )
    path.write_text(WRITTEN.replace("name: anneal", "<<: {name: anneal}"))
    assert Schedule.load(str(path)) == schedule


ONE = "phases: [{name: main, weights: {web: 1}, rows: 5}]\n"


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("phases:\n  - name: main\n   weights: 3\n", ValueError, r", line 3: not YAML: "),
        ("phases:\n\t- name: main\n", ValueError, r", line 2: not YAML: .*Indent with spaces, not with tabs\."),
        ("a: [1", ValueError, r", line 1: not YAML: "),
        ("phases: []\nphases: []\n", ValueError, ", line 2: not YAML: 'phases' occurs twice, first in line 1"),
        ("? [a]\n: 1\n", ValueError, "line 1: not YAML: a key must be text"),
        ("a: !!python/object:os.system {}\n", ValueError, "line 1: not YAML: could not determine a constructor"),
        ("", TypeError, "a schedule is a dict with phases, max_passes, sources, got None"),
        ("- 1\n", TypeError, "a schedule is a dict with phases"),
        ("phase: []\n", ValueError, r"a schedule has no field 'phase'. Did you mean 'phases'\? Its fields are phases, max_passes, sources\."),
        ("max_passes: {web: 1}\n", ValueError, "a schedule needs 'phases'"),
        ("phases: {name: main}\n", TypeError, "takes a list of phases"),
        ("phases: [3]\n", TypeError, "phase 1 is a dict with name, weights"),
        ("phases: [{weights: {web: 1}, rows: 5}]\n", ValueError, "phase 1 needs 'name'"),
        (ONE.replace("rows", "row"), ValueError, r"phase 'main' has no field 'row'. Did you mean 'rows'\? Its fields are name, weights, steps"),
        (ONE.replace("5", "many"), TypeError, "phase 'main': rows must be an integer, got 'many'"),
        (ONE.replace("5", "0"), ValueError, "phase 'main': rows must be at least 1, got 0"),
        (ONE.replace("5", "1.5"), TypeError, "phase 'main': rows must be an integer, got 1.5"),
        (ONE.replace("{web: 1}", "web"), TypeError, "phase 'main': weights is a dict by name"),
        (ONE.replace("{web: 1}", "{web: true}"), ValueError, "phase 'main': weights must be numbers"),
        (ONE + "max_passes: {web: all}\n", TypeError, "max_passes of 'web' must be an integer, got 'all'"),
        (ONE + "max_passes: {web:}\n", TypeError, "max_passes of 'web' must be an integer, got None"),
        (ONE + "max_passes: {wbe: 2}\n", ValueError, "max_passes of 'wbe': no phase has a weight for it. The sources are web"),
        (ONE + "sources: {web: 3}\n", TypeError, "sources: 'web' needs a path or a list of paths, got 3"),
        (ONE + "sources: [web]\n", TypeError, "sources is a dict by name of the source"),
    ],
)  # fmt: skip
def test_errors_name_the_file_the_phase_and_the_field(tmp_path: Path, text: str, kind: Any, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(kind, match=message) as problem:
        Schedule.load(path)
    assert str(problem.value).startswith(str(path)) and problem.type is kind
    if "not YAML" not in message:
        other = tmp_path / "run.json"
        other.write_text(json.dumps(yaml.safe_load(text)))
        with pytest.raises(kind, match=message) as problem:
            Schedule.load(other)
        assert str(problem.value).startswith(str(other))


def test_files_that_hold_no_value(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"there is no file .*nothing.yaml"):
        Schedule.load(tmp_path / "nothing.yaml")
    with pytest.raises(ValueError, match=r"expected a file that ends with .yaml, .yml, .json, got .*run.toml"):
        Schedule.load(tmp_path / "run.toml")
    (tmp_path / "run.json").write_text("\n")
    with pytest.raises(ValueError, match=r"run.json is empty\. Write it again"):
        Schedule.load(tmp_path / "run.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ValueError, match=r"folder.json is a folder\. Pass the path of a file"):
        Schedule.load(tmp_path / "folder.json")
    (tmp_path / "run.json").write_text('{"phases": [{"na')
    with pytest.raises(ValueError, match=r"line 1: not JSON: Unterminated string\. .* truncated, write it again"):
        Schedule.load(tmp_path / "run.json")
    (tmp_path / "run.json").write_text('{"phases":\n [,]}')
    with pytest.raises(ValueError, match=r"run.json, line 2: not JSON: "):
        Schedule.load(tmp_path / "run.json")
    (tmp_path / "run.json").write_text('{"phases": [], "phases": []}')
    with pytest.raises(ValueError, match=r"run.json: 'phases' occurs twice"):
        Schedule.load(tmp_path / "run.json")
    (tmp_path / "run.yaml").write_bytes(b"phases: \xff")
    with pytest.raises(ValueError, match=r"run.yaml is not UTF-8 text: .* at byte 8"):
        Schedule.load(tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_bytes(b"phases: \x01")
    with pytest.raises(ValueError, match=r"run.yaml: not YAML: "):
        Schedule.load(tmp_path / "run.yaml")


def test_a_save_replaces_the_file_or_leaves_it(tmp_path: Path) -> None:
    schedule = Schedule([Phase("main", {"web": np.float64(0.1)}, rows=np.int64(5))], max_passes={"web": np.int64(2)})
    path, link = tmp_path / "run.yaml", tmp_path / "link.yaml"
    schedule.save(path)
    path.chmod(0o640)
    link.symlink_to(path)
    longer = Schedule([*schedule.phases, Phase("more", rows=7)])
    longer.save(link)
    assert link.is_symlink() and Schedule.load(path) == longer and path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(FileNotFoundError):
        schedule.save(tmp_path / "no folder" / "run.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(OSError):
        schedule.save(tmp_path / "folder.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.json", "link.yaml", "run.yaml"]


def test_yaml_needs_pyyaml_and_json_does_not(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["yaml"] = None  # as if it were not installed
import midepoch
schedule = midepoch.Schedule([midepoch.Phase("main", {"web": 1}, rows=5)])
schedule.save("run.json")
assert midepoch.Schedule.load("run.json") == schedule
for call in (schedule.save, midepoch.Schedule.load):
    try:
        open("run.yaml", "a").close()
        call("run.yaml")
    except ModuleNotFoundError as problem:
        print(problem)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300
    )
    said = 'run.yaml requires PyYAML: pip install "midepoch[cli]". A .json file requires no package.'
    assert done.stdout.splitlines() == [said, said]


def test_a_schedule_is_public() -> None:
    assert midepoch.Schedule is Schedule and midepoch.Phase is Phase
