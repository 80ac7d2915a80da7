"""The metadata of a DCP folder, read from pickles of torch and of strangers."""

from __future__ import annotations

import copyreg
import pathlib
import pickle
import pickletools
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import filesystem, metadata

from midepoch.checkpoint.backends.dcp import _Reader
from midepoch.errors import CheckpointDamagedError

NAMES = [
    *(("torch.distributed.checkpoint.metadata", name) for name in ("Metadata", "MetadataIndex", "TensorProperties")),
    *(("torch.distributed.checkpoint.metadata", name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata")),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch", name) for name in ("Size", "float32", "onnx", "load")),
    *(("pathlib", name) for name in ("PosixPath", "PosixPath.write_text", "os.system")),
    ("collections", "OrderedDict"),
    *(("builtins", name) for name in ("eval", "getattr", "setattr", "exec", "object")),
    *(("os", "system"), ("copyreg", "_reconstructor"), ("torch.serialization", "_get_layout")),
]
CLASSES = [pathlib.PosixPath, torch.Size, filesystem._StorageInfo, dict, *filter(None, vars(metadata).values())]
REAL: dict[Path, bytes] = {}
_watched: list[str] | None = None


def watch(event: str, _: tuple[Any, ...]) -> None:
    if _watched is not None:
        _watched.append(event)


sys.addaudithook(watch)


def read(folder: Path, data: bytes) -> metadata.Metadata:
    (folder / ".metadata").write_bytes(data)
    result = _Reader(str(folder)).read_metadata()
    assert isinstance(result, metadata.Metadata)
    return result


def globals_now() -> Any:
    classes = {each: dict(vars(each)) for each in CLASSES if isinstance(each, type)}
    return classes, set(sys.modules), dict(vars(torch)), dict(copyreg._extension_cache)  # type: ignore[attr-defined]


def real(folder: Path) -> bytes:
    tensors = {"a": torch.zeros(3, 4), "m": {"b": torch.zeros((), dtype=torch.bfloat16)}, "c": torch.zeros(0, 2**33)}
    writer = dcp.FileSystemWriter(str(folder), single_file_per_rank=True, sync_files=False)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    return (folder / ".metadata").read_bytes()


def name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + pickle.STACK_GLOBAL


def text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value.encode())) + value.encode()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_metadata_of_torch(tmp_path: Path) -> None:
    data = real(tmp_path)
    expected, result = pickle.loads(data), read(tmp_path, data)
    assert result.state_dict_metadata == expected.state_dict_metadata
    assert result.storage_data == expected.storage_data
    assert [index.index for index in result.storage_data] == [index.index for index in expected.storage_data]


@pytest.mark.parametrize(
    ("module", "cls"), [("pathlib", "PosixPath"), ("torch.distributed.checkpoint.metadata", "Metadata")]
)
def test_no_class_is_changed(module: str, cls: str, tmp_path: Path) -> None:
    before = globals_now()
    changes = pickle.MARK + text("_str") + text("/etc") + text("__fspath__") + name("torch", "Size")
    state = pickle.NONE + pickle.EMPTY_DICT + changes + pickle.SETITEMS + pickle.TUPLE2
    try:
        with pytest.raises(CheckpointDamagedError):
            read(tmp_path, pickle.PROTO + b"\x04" + name(module, cls) + state + pickle.BUILD + pickle.STOP)
        assert globals_now() == before
    finally:
        for each, attributes in before[0].items():
            for added in set(vars(each)) - set(attributes):
                delattr(each, added)


def hostile() -> dict[str, bytes]:
    tuples = pickle.EMPTY_TUPLE + b"".join(
        pickle.MEMOIZE + pickle.BINGET + bytes([level]) + pickle.TUPLE2 for level in range(60)
    )
    size = name("torch", "Size") + pickle.MARK + pickle.BININT1 * 2 * 40_000 + pickle.TUPLE + pickle.TUPLE1
    return {
        "a key whose hash takes 2**60 steps": pickle.EMPTY_DICT + tuples + pickle.NONE + pickle.SETITEM + pickle.STOP,
        "a memo of 32 GB": pickle.NONE + pickle.LONG_BINPUT + b"\xff\xff\xff\x7f" + pickle.STOP,
        "a text of 4 GB": pickle.BINUNICODE + b"\xff\xff\xff\xff" + b"a",
        "bytes of 2**62": pickle.BINBYTES8 + struct.pack("<Q", 2**62) + b"a",
        "a frame of 2**62": pickle.FRAME + struct.pack("<Q", 2**62) + pickle.NONE + pickle.STOP,
        "a million lists in lists": pickle.EMPTY_LIST * 1_000_000 + pickle.APPEND * 999_999 + pickle.STOP,
        "80,000 dimensions": size + pickle.REDUCE + pickle.STOP,
        "a number of 10**5 digits": b"I" + b"9" * 100_000 + b"\n.",
        "an extension": pickle.EXT1 + b"\x01" + pickle.STOP,
        "a persistent id": pickle.NONE + pickle.BINPERSID + pickle.STOP,
        "nothing": b"",
    }


@pytest.mark.parametrize("label", hostile())
def test_a_stream_that_would_take_memory_or_time(label: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamagedError):
        read(tmp_path, hostile()[label])


def test_a_list_of_chunks_that_all_tensors_share(tmp_path: Path) -> None:
    """1,000 tensors of 100,000 chunks would be 10**8 objects, from a file of 400 kB."""
    chunk = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
    chunks, properties = [chunk] * 100_000, metadata.TensorProperties(dtype=torch.float32)
    tensors = {f"{key}": metadata.TensorStorageMetadata(properties, torch.Size([1]), chunks) for key in range(1_000)}
    result = read(tmp_path, pickle.dumps(metadata.Metadata(tensors, storage_data={})))
    assert sum(len(entry.chunks) for entry in result.state_dict_metadata.values()) <= 100_000


@pytest.mark.parametrize("path", ["../a.distcp", "/etc/passwd", "..", "", "a\0b", "a\\b"])
def test_a_file_outside_of_the_folder(path: str, tmp_path: Path) -> None:
    data = {metadata.MetadataIndex("a"): filesystem._StorageInfo(path, 0, 1)}
    with pytest.raises(CheckpointDamagedError, match="names a file"):
        read(tmp_path, pickle.dumps(metadata.Metadata({}, storage_data=data)))


@st.composite
def arguments(draw: st.DrawFn, opcode: pickletools.OpcodeInfo) -> bytes:
    """Bytes of the argument of an opcode, mostly well-formed."""
    if opcode.arg is None:
        return b""
    width = opcode.arg.n
    if width > 0:
        return draw(
            st.integers(0, 3).map(lambda number: number.to_bytes(width, "little"))
            | st.binary(min_size=width, max_size=width)
        )
    value = draw(st.sampled_from(["1", "os", "system", "_str", "torch", "Size", ""]) | st.text(max_size=8))
    raw = value.encode("utf-8", "surrogatepass")
    counted = {pickletools.TAKEN_FROM_ARGUMENT1: "<B", pickletools.TAKEN_FROM_ARGUMENT4: "<i"}
    counted |= {pickletools.TAKEN_FROM_ARGUMENT4U: "<I", pickletools.TAKEN_FROM_ARGUMENT8U: "<Q"}
    if width == pickletools.UP_TO_NEWLINE:
        return (raw.replace(b"\n", b"") + b"\n") * (2 if opcode.name in ("GLOBAL", "INST") else 1)
    return struct.pack(counted[width], len(raw)) + raw


INSTRUCTIONS = st.sampled_from(pickletools.opcodes).flatmap(
    lambda opcode: arguments(opcode).map(lambda argument: opcode.code.encode("latin-1") + argument)
)
LIKELY = st.sampled_from(
    [
        *(name(*each) for each in NAMES),
        *(f"c{module}\n{attribute}\n".encode() for module, attribute in NAMES),
        *(text(each) for each in ("chunks", "fqn", "__class__", "__init__", "__reduce__", "__setstate__", "_str")),
        *(pickle.EMPTY_TUPLE + pickle.NEWOBJ, pickle.EMPTY_TUPLE + pickle.REDUCE, pickle.BUILD, pickle.REDUCE),
        *(pickle.EMPTY_DICT, pickle.MARK, pickle.SETITEMS, pickle.TUPLE1, pickle.TUPLE2, pickle.MEMOIZE),
        pickle.NONE + pickle.EMPTY_DICT + text("_str") + text("x") + pickle.SETITEM + pickle.TUPLE2 + pickle.BUILD,
    ]
)
STREAMS = st.lists(INSTRUCTIONS | LIKELY, max_size=24).map(lambda parts: b"".join(parts) + pickle.STOP)


def check(folder: Path, data: bytes) -> None:
    """Read a stream: it is metadata or an error of ours, nothing is called, and no class or module changes."""
    global _watched
    before = globals_now()
    (folder / ".metadata").write_bytes(data)
    reader = _Reader(str(folder))
    _watched = []
    try:
        reader.read_metadata()
    except CheckpointDamagedError:
        pass
    finally:
        events, _watched = _watched, None
    assert set(events) <= {"open"}, data
    assert globals_now() == before


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=STREAMS)
def test_no_stream_of_opcodes_has_an_effect(data: bytes, tmp_path: Path) -> None:
    check(tmp_path, data)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_no_edit_of_real_metadata_has_an_effect(draw: st.DataObject, tmp_path: Path) -> None:
    data = REAL.get(tmp_path) or REAL.setdefault(tmp_path, real(tmp_path))
    starts = [position for *_, position in pickletools.genops(data)]
    edits = draw.draw(
        st.lists(st.tuples(st.sampled_from(starts), INSTRUCTIONS | LIKELY, st.integers(0, 3)), max_size=3)
    )
    for position, instruction, removed in sorted(edits, reverse=True):
        data = data[:position] + instruction + data[position + removed :]
    check(tmp_path, data)
