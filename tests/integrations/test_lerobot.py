"""LeRobot datasets in place, against the items that LeRobotDataset returned for the same files (tests/fixtures/lerobot)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from launch import Program
from midepoch import CheckpointMismatchError, DataNotFoundError, FormatError, MapError
from midepoch.testing import assert_resumes_exactly

pytest.importorskip("av", reason="PyAV is not installed")
from midepoch.integrations.lerobot import from_lerobot

EXAMPLES = Path(__file__).parents[2] / "examples"
FIXTURES = Path(__file__).parents[1] / "fixtures" / "lerobot"
DELTAS = {"action": [0.0, 0.1, 0.2], "observation.state": [-0.1, 0.0], "observation.images.top": [-0.1, 0.0]}
TOP = "observation.images.top"


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_items_of_lerobot(version: str) -> None:
    """LeRobot 0.3.3 wrote and read the one, 0.4.4 the other."""
    ds = from_lerobot(FIXTURES / version, delta_timestamps=DELTAS)
    golden = np.load(FIXTURES / f"{version}.npz")
    assert len(ds) == 21
    plain = from_lerobot(FIXTURES / version)[8]
    for number, item in enumerate(ds):
        assert set(item) == set(golden.files)
        for name, values in golden.items():
            value = item[name]
            if isinstance(value, str):
                assert value == str(values[number])
            elif "images" in name and not name.endswith("_is_pad"):
                assert value.dtype == torch.float32 and value.shape == values[number].shape
                # FFmpeg's conversion of colors differs a little between its versions
                assert np.abs(value.numpy() * 255 - values[number]).max() <= 3
            else:
                assert value.dtype == torch.from_numpy(values).dtype and np.array_equal(value.numpy(), values[number])
    assert plain[TOP].shape == (3, 48, 64) and torch.equal(plain[TOP], ds[8][TOP][1])
    assert torch.equal(plain["action"], ds[8]["action"][0])
    chosen = from_lerobot(FIXTURES / version, episodes=[2, 0], delta_timestamps=DELTAS)
    assert [int(item["index"]) for item in chosen] == [*range(7), *range(12, 21)]
    assert torch.equal(chosen[7]["observation.state"], ds[12]["observation.state"])


def test_resumes_exactly() -> None:
    ds = from_lerobot(FIXTURES / "v3.0", episodes=[0, 2], delta_timestamps=DELTAS).shuffle(seed=1)
    assert_resumes_exactly(
        lambda: ds.loader(6),
        resume_with=[lambda: ds.loader(6, num_workers=1)],
        epochs=1,
        steps=[1, 2],
    )
    state = ds.loader(6).state_dict()
    other = from_lerobot(FIXTURES / "v3.0", episodes=[0, 2], delta_timestamps={"action": [0.1]}).shuffle(seed=1)
    with pytest.raises(CheckpointMismatchError):
        other.loader(6).load_state_dict(state)


def test_example(program: Program, tmp_path: Path) -> None:
    """Killed alone, and resumed on two ranks: 5 steps in an epoch, a checkpoint every two."""
    script, robot = EXAMPLES / "lerobot_loop.py", str(FIXTURES / "v3.0")
    assert program(1, script, robot, str(tmp_path), "--die-at", "7") != 0
    assert program(2, script, robot, str(tmp_path)) == 0
    steps: dict[int, list[int]] = {}
    for line in "".join((tmp_path / f"rows-{rank}.txt").read_text() for rank in range(2)).splitlines():
        step, *rows = (int(word) for word in line.split())
        steps.setdefault(step, []).extend(rows)
    loader = from_lerobot(FIXTURES / "v3.0").shuffle(seed=42).loader(4, last_batch="drop")
    expected = [sorted(batch["index"].tolist()) for _ in range(2) for batch in loader]
    assert sorted(steps.pop(7)) == sorted(expected[6] * 2)  # before the kill, and again
    assert {step: sorted(rows) for step, rows in steps.items()} == {
        step: rows for step, rows in enumerate(expected, 1) if step != 7
    }


def test_damage(tmp_path: Path) -> None:
    for wrong in (tmp_path, FIXTURES / "v3.0" / "meta" / "info.json"):
        with pytest.raises(DataNotFoundError, match=r"no meta/info\.json"):
            from_lerobot(wrong)
    folder = tmp_path / "robot"
    shutil.copytree(FIXTURES / "v3.0", folder)
    (video,) = folder.glob("videos/*/*/*.mp4")
    whole = video.read_bytes()
    video.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(MapError, match=r"row 20 .*file-000\.mp4 cannot be decoded"):
        from_lerobot(folder)[20]
    video.unlink()
    with pytest.raises(MapError, match=r"row 0 .*file-000\.mp4 cannot be decoded at 0\.0000 s: .*No such file"):
        next(iter(from_lerobot(folder)))
    video.write_bytes(whole)
    (meta,) = folder.glob("meta/episodes/*/*.parquet")
    table = pq.read_table(meta)
    shifted = [start + 0.04 for start in table.column(f"videos/{TOP}/from_timestamp").to_pylist()]
    place = table.column_names.index(f"videos/{TOP}/from_timestamp")
    pq.write_table(table.set_column(place, table.column_names[place], [shifted]), meta)
    with pytest.raises(MapError, match=r"no frame within 0\.0001 s of 0\.0400 s: the nearest is 0\.0400 s away"):
        from_lerobot(folder)[0]
    assert from_lerobot(folder, tolerance_s=0.05)[0][TOP].shape == (3, 48, 64)
    pq.write_table(table.slice(0, 2), meta)
    with pytest.raises(FormatError, match=r"21 frames in data/, and 12 in meta/episodes"):
        from_lerobot(folder)
    pq.write_table(table.slice(1), meta)
    with pytest.raises(FormatError, match="robot cannot be read: ValueError: episode 0 of 2 has the number 1"):
        from_lerobot(folder)
    meta.write_bytes(meta.read_bytes()[:99])
    with pytest.raises(FormatError, match="robot cannot be read: ArrowInvalid"):
        from_lerobot(folder)
    info = json.loads((folder / "meta" / "info.json").read_text())
    (folder / "meta" / "info.json").write_text(json.dumps({**info, "codebase_version": "v1.6"}))
    with pytest.raises(FormatError, match=r"layout v1\.6"):
        from_lerobot(folder)
    (folder / "meta" / "info.json").write_text(json.dumps(info)[:99])
    with pytest.raises(FormatError, match="robot cannot be read: JSONDecodeError"):
        from_lerobot(folder)


def test_tasks_are_found_by_their_number(tmp_path: Path) -> None:
    """Numbers may have gaps, and lines any order."""
    shutil.copytree(FIXTURES / "v2.1", tmp_path, dirs_exist_ok=True)
    lines = (tmp_path / "meta" / "tasks.jsonl").read_text().splitlines()
    other = json.dumps({"task_index": -1, "task": "none of the frames has it"})
    (tmp_path / "meta" / "tasks.jsonl").write_text("\n".join([other, *reversed(lines)]))
    assert from_lerobot(tmp_path)[0]["task"] == from_lerobot(FIXTURES / "v2.1")[0]["task"]


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(FIXTURES))
    assert len(from_lerobot("~/v3.0")) == 21  # as the message for a wrong folder writes it
    with pytest.raises(ValueError, match="no column 'speed'"):
        from_lerobot(FIXTURES / "v3.0", delta_timestamps={"speed": [0.1]})
    with pytest.raises(ValueError, match=r"multiples of 1/10 s, got \[0\.15\]"):
        from_lerobot(FIXTURES / "v3.0", delta_timestamps={"action": [0.15]})
    with pytest.raises(ValueError, match="delta_timestamps of 'action' are empty"):
        from_lerobot(FIXTURES / "v3.0", delta_timestamps={"action": []})
    with pytest.raises(ValueError, match=r"episode must be in \[0, 3\), got 3"):
        from_lerobot(FIXTURES / "v3.0", episodes=[3])
