"""Damaged and hostile checkpoints: passed over or refused, never a crash, never a wrong restore."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from midepoch.checkpoint import CheckpointDamagedError, CheckpointError, CheckpointMismatchError, PipelineCheckpoint
from midepoch.checkpoint.manifest import KEY


class Numbers:
    def __init__(self, at: int = 0) -> None:
        self.at = at

    def get_state(self) -> dict[str, Any]:
        return {"at": self.at, "rng": np.arange(self.at, self.at + 3000)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        assert state["rng"][0] == self.at


def model_at(value: int) -> torch.nn.Module:
    torch.manual_seed(value)
    return torch.nn.Linear(70, 50)


def save(folder: Path, step: int, backend: str = "files") -> None:
    PipelineCheckpoint(folder, backend=backend).save(
        Numbers(step),
        model_at(step),
        step=step,
        metadata={"step": step},
        extra={"note": {"value": step, "array": np.full(3000, step)}},
    )


def restored(folder: Path, backend: str = "files") -> int:
    """The step that a restart restores. Fails if anything of it is not of that step."""
    numbers, model, note = Numbers(), model_at(0), {"value": 0, "array": np.zeros(3000, int)}
    step = PipelineCheckpoint(folder, backend=backend).restore_latest(numbers, model, extra={"note": note})
    assert step is not None
    assert numbers.at == step
    assert note["value"] == step
    assert (note["array"] == step).all()
    assert torch.equal(model.weight, model_at(step).weight)
    assert torch.equal(model.bias, model_at(step).bias)
    return step


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    for step in (1, 2):
        save(folder, step)
    return folder


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy"))


FILES = [
    "manifest.json",
    "data.json",
    "data.safetensors",
    "model.json",
    "model.safetensors",
    "rng.json",
    "extra.note.json",
    "extra.note.safetensors",
]


def test_the_files_are_those(copy: Path) -> None:
    assert sorted(os.listdir(copy / "step_2")) == sorted(FILES)
    assert restored(copy) == 2


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, "one less", "one more"])
@pytest.mark.parametrize("name", FILES)
def test_cut(name: str, share: Any, copy: Path) -> None:
    path = copy / "step_2" / name
    size = path.stat().st_size
    os.truncate(
        path, {"one less": size - 1, "one more": size + 1}.get(share) if isinstance(share, str) else int(size * share)
    )
    # Without its last line feed a manifest says the same.
    assert restored(copy) == (2 if (name, share) == ("manifest.json", "one less") else 1)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", FILES)
def test_one_bit_flipped(name: str, seed: int, copy: Path) -> None:
    path = copy / "step_2" / name
    data = bytearray(path.read_bytes())
    dice = random.Random(f"{name} {seed}")
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)
    # A flipped bit may change the white space of a manifest, which means the same.
    assert restored(copy) == 1 or name == "manifest.json"


@pytest.mark.parametrize("name", FILES)
def test_missing(name: str, copy: Path) -> None:
    (copy / "step_2" / name).unlink()
    assert restored(copy) == 1


@pytest.mark.parametrize("name", FILES)
def test_of_another_step(name: str, copy: Path) -> None:
    same = (copy / "step_1" / name).read_bytes() == (copy / "step_2" / name).read_bytes()
    assert same == (name == "model.json"), "which says only what arrays there are"
    shutil.copy(copy / "step_1" / name, copy / "step_2" / name)
    assert restored(copy) == (2 if same else 1)


@pytest.mark.parametrize("other", FILES[1:])
@pytest.mark.parametrize("name", FILES[1:])
def test_swapped(name: str, other: str, copy: Path) -> None:
    if name < other:
        one, two = copy / "step_2" / name, copy / "step_2" / other
        one.rename(copy / "aside")
        two.rename(one)
        (copy / "aside").rename(two)
        assert restored(copy) == 1


@pytest.mark.parametrize("kind", ["folder", "link", "outside link", "fifo", "empty", "device"])
@pytest.mark.parametrize("name", ["manifest.json", "data.json", "model.safetensors"])
def test_something_else_of_that_name(name: str, kind: str, copy: Path) -> None:
    path = copy / "step_2" / name
    original = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(copy / "step_1" / name)
    elif kind == "outside link":
        (copy / "outside").write_bytes(original)
        path.symlink_to(copy / "outside")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
    assert restored(copy) == 1


def test_steps_that_changed_places(copy: Path) -> None:
    (copy / "step_1").rename(copy / "aside")
    (copy / "step_2").rename(copy / "step_1")
    (copy / "aside").rename(copy / "step_2")
    with pytest.raises(CheckpointDamagedError, match="manifest is that of step"):
        restored(copy)


def test_strangers_in_the_folder(copy: Path) -> None:
    for name in (
        "step_03",
        "step_-1",
        "step_x",
        "step_9.tmp",
        "step_",
        "step_99999999999999999999",
        "STEP_5",
        "notes",
        ".hidden",
    ):
        (copy / name).mkdir()
    (copy / "step_7").mkdir()
    (copy / "step_8").write_text("a file")
    (copy / "step_2" / "stranger.bin").write_bytes(b"?")
    assert restored(copy) == 2
    save(copy, 3)
    assert restored(copy) == 3


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A manifest that was changed on purpose, with the right sum of itself."""

    def apply(folder: Path) -> None:
        path = folder / "step_2/manifest.json"
        content = json.loads(path.read_text())
        content.pop("sha256")
        changed = change(content)
        content = content if changed is None else changed
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        if isinstance(content, dict):
            content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(json.dumps(content))

    return apply


def _file(name: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["files"][name] = content["files"].pop("data.json")

    return change


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "list": lambda content: [content],
    "null": lambda content: 0,
    "step": lambda content: content.update(step=3),
    "step text": lambda content: content.update(step="2"),
    "step huge": lambda content: content.update(step=10**40),
    "step negative": lambda content: content.update(step=-2),
    "sequence huge": lambda content: content.update(sequence=10**40),
    "sequence none": lambda content: content.update(sequence=None),
    "sequence gone": lambda content: content.pop("sequence") and None,
    "world": lambda content: content.update(world_size=[]),
    "files list": lambda content: content.update(files=[]),
    "files empty": lambda content: content.update(files={}),
    "files none": lambda content: content.update(files=None),
    "size huge": lambda content: content["files"]["data.json"].update(size=10**18),
    "size negative": lambda content: content["files"]["data.json"].update(size=-1),
    "size float": lambda content: content["files"]["data.json"].update(size=1.5),
    "sums none": lambda content: content["files"]["data.json"].update(crc32=[]),
    "sums text": lambda content: content["files"]["data.json"].update(crc32=["zz"]),
    "sums many": lambda content: content["files"]["data.json"].update(crc32=["0"] * 1000),
    "piece": lambda content: content.update(piece=0),
    "metadata": lambda content: content.update(metadata=[1]),
    "parts": lambda content: content.update(parts="x"),
    "version 0": lambda content: content.update({KEY: 0}),
    "version none": lambda content: content.update({KEY: None}),
    "version gone": lambda content: content.pop(KEY) and None,
    "time": lambda content: content.update(time="yesterday"),
    "time huge": lambda content: content.update(time=[]),
    **{
        f"file {name!r:.30}": _file(name)
        for name in (
            "../data.json",
            "/etc/passwd",
            "a/../../x",
            "",
            ".",
            "..",
            "a//b",
            "a\\b",
            "a\0b",
            "C:x",
            "x" * 2000,
            "./data.json",
        )
    },
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_manifest(change: Callable[[dict[str, Any]], Any], copy: Path) -> None:
    rewritten(change)(copy)
    try:
        assert restored(copy) == 1
    except CheckpointError:
        pass  # refused


@pytest.mark.parametrize("version", [2, 3, 10**9])
def test_a_newer_version_is_refused_not_passed_over(version: int, copy: Path) -> None:
    rewritten(lambda content: content.update({KEY: version}))(copy)
    with pytest.raises(CheckpointError, match="Upgrade midepoch"):
        restored(copy)


def resigned(folder: Path, name: str, data: bytes) -> None:
    """Another file in the step, with the right sums in a manifest with the right sum: a stranger's own making."""
    import zlib

    (folder / "step_2" / name).write_bytes(data)

    def change(content: dict[str, Any]) -> None:
        content["files"][name] = {"size": len(data), "crc32": [f"{zlib.crc32(data):08x}"] if data else []}

    rewritten(change)(folder)


def header(content: Any, body: bytes = b"", size: int | None = None) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + body


def stranger_files() -> Iterator[tuple[str, str, bytes]]:
    def array(**changes: Any) -> bytes:
        entry = {"$": "array", "of": "numpy", "dtype": "int64", "shape": [3000], "name": "rng", **changes}
        return json.dumps({"at": 2, "rng": entry}).encode()

    for label, text in {
        "garbage": b"\xff\xfe{",
        "empty": b"",
        "deep": b"[" * 100_000,
        "deep dicts": b'{"a":' * 5000 + b"1" + b"}" * 5000,
        "huge number": b'{"at": ' + b"9" * 10_000 + b"}",
        "shape": array(shape=[10**15]),
        "negative": array(shape=[-3000]),
        "dtype": array(dtype="O"),
        "dtype code": array(dtype="int64,int64"),
        "library": array(of="subprocess"),
        "name": array(name="other"),
        "name list": array(name=[1]),
        "inline": array(data="AAAA", name=None),
        "pickle": json.dumps(
            {"at": {"$": "pickle", "data": "gASVIQAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAZ0b3VjaCB4lIWUUpQu"}}
        ).encode(),
    }.items():
        yield f"json {label}", "data.json", text
    place = {"dtype": "I64", "shape": [3000], "data_offsets": [0, 24000]}
    body = bytes(24000)
    for label, data in {
        "garbage": b"\0" * 7,
        "long header": header({}, size=2**63),
        "no json": header(b"nonsense", body),
        "list": header([], body),
        "missing": header({}, body),
        "offsets": header({"rng": {**place, "data_offsets": [0, 2**60]}}, body),
        "backwards": header({"rng": {**place, "data_offsets": [24000, 0]}}, body),
        "negative": header({"rng": {**place, "data_offsets": [-8, 23992]}}, body),
        "texts": header({"rng": {**place, "data_offsets": ["0", "24000"]}}, body),
        "short": header({"rng": place}, body[:100]),
        "deep": header(b"[" * 100_000, body),
    }.items():
        yield f"tensors {label}", "data.safetensors", data


STRANGERS = list(stranger_files())


@pytest.mark.parametrize(
    ("name", "data"), [(name, data) for _, name, data in STRANGERS], ids=[label for label, *_ in STRANGERS]
)
def test_a_strangers_file_with_right_sums(
    name: str, data: bytes, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    resigned(copy, name, data)
    try:
        assert restored(copy) == 1
    except (CheckpointError, CheckpointMismatchError):
        pass  # refused: a step that says of itself that it is well and is not
    assert not (tmp_path / "x").exists(), "code of the checkpoint was run"


def test_a_dcp_step_runs_no_code_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("touch harmed",)

    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        save(tmp_path / "run", step, "dcp")
    resigned(tmp_path / "run", "arrays/.metadata", pickle.dumps(Evil()))
    assert restored(tmp_path / "run", "dcp") == 2, "the pickle of torch is not read"
    parts = (tmp_path / "run/step_2/arrays/parts.json").read_bytes()
    for evil in (pickle.dumps(Evil()), parts.replace(b"__0_0.distcp", b"../../../a.d")):
        resigned(tmp_path / "run", "arrays/parts.json", evil)
        with pytest.raises(CheckpointDamagedError, match="parts of the tensors"):
            restored(tmp_path / "run", "dcp")
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("backend", ["dcp", "orbax"])
def test_damage_in_a_backends_folder(backend: str, tmp_path: Path) -> None:
    good = tmp_path / "good"
    for step in (1, 2):
        save(good, step, backend)
    inside = sorted(path.relative_to(good) for path in (good / "step_2/arrays").rglob("*") if path.is_file())
    assert inside
    for number, name in enumerate(inside):
        for kind in ("flip", "cut", "gone"):
            folder = Path(shutil.copytree(good, tmp_path / f"{number} {kind}"))
            data = bytearray((folder / name).read_bytes())
            if kind == "gone":
                (folder / name).unlink()
            else:
                data[len(data) // 2 :] = (
                    b"" if kind == "cut" else bytes([data[len(data) // 2] ^ 1, *data[len(data) // 2 + 1 :]])
                )
                (folder / name).write_bytes(data)
            assert restored(folder, backend) == 1
            shutil.rmtree(folder)
