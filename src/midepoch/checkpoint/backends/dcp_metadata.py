"""Reader of the metadata that ``torch.distributed.checkpoint`` pickles into a folder.

A checkpoint may come from a stranger, and ``pickle.Unpickler`` is not safe even with a list of allowed classes: a
stream can set attributes of these classes, or request 32 GB for its memo. Here the opcodes of such a pickle are
interpreted. Nothing is imported, called or changed: names and instances become ``_Name`` and ``_Record``. torch's
objects are made from them afterwards, field by field.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from midepoch.errors import CheckpointDamagedError

T = TypeVar("T")

_RECORDS = {
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
    },
}
_FUNCTIONS = {
    "torch": {"Size"},
    "torch.distributed.checkpoint.metadata": {"_MEM_FORMAT_ENCODING"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}
_CONSTANTS: dict[bytes, Any] = {
    pickle.NONE: None,
    pickle.NEWTRUE: True,
    pickle.NEWFALSE: False,
    pickle.EMPTY_TUPLE: (),
}
_TUPLES = {pickle.TUPLE1: 1, pickle.TUPLE2: 2, pickle.TUPLE3: 3}
_MEMO = {pickle.BINGET, pickle.LONG_BINGET}
_INTEGERS = {pickle.BININT, pickle.BININT1, pickle.BININT2}
_SIZED = {pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.LONG1}
_WIDTHS = {
    **dict.fromkeys((*_CONSTANTS, *_TUPLES, pickle.TUPLE, pickle.MARK, pickle.STOP, pickle.MEMOIZE), 0),
    **dict.fromkeys((pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM), 0),
    **dict.fromkeys((pickle.SETITEMS, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD), 0),
    **dict.fromkeys((pickle.PROTO, pickle.BININT1, pickle.LONG1, pickle.BINGET, pickle.SHORT_BINUNICODE), 1),
    **dict.fromkeys((pickle.BININT2,), 2),
    **dict.fromkeys((pickle.BININT, pickle.LONG_BINGET, pickle.BINUNICODE), 4),
    **dict.fromkeys((pickle.FRAME,), 8),
}
"""Opcodes that are read, with the bytes of the integer that follows each."""
_MOST_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class _Name:
    module: str
    name: str


@dataclass(slots=True, eq=False)
class _Record:
    """An instance. ``state``: its fields, None until they are set."""

    kind: str
    state: Any = None


def read_metadata(data: bytes) -> Metadata:
    """Return torch's metadata of a pickle. Raises CheckpointDamagedError for anything else, and changes nothing."""
    try:
        fields = _fields(_loads(data), "Metadata")
        return Metadata(
            {_typed(key, str): _tensor(entry) for key, entry in _typed(fields["state_dict_metadata"], dict).items()},
            storage_data={_index(key): _file(entry) for key, entry in _typed(fields["storage_data"], dict).items()},
            storage_meta=StorageMeta(),
        )
    except CheckpointDamagedError:
        raise
    except Exception as problem:
        raise CheckpointDamagedError(f"the metadata of the tensors cannot be read: {problem!r:.200}") from None


def _loads(data: bytes) -> Any:
    """Return the value of a pickle, made of plain values, names and records."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []
    position, opcode = 0, b""
    while opcode != pickle.STOP:
        opcode = data[position : position + 1]
        width = _WIDTHS.get(opcode)
        if width is None:
            raise ValueError(f"{opcode!r} at byte {position}")
        position += 1 + width
        if width:
            number = int.from_bytes(data[position - width : position], "little")
            if opcode in _MEMO:
                stack.append(memo[number])
            elif opcode in _INTEGERS:
                stack.append(number - (number >> 31 << 32))
            elif opcode in _SIZED:
                value = data[position : position + number]
                position += number
                is_text = opcode != pickle.LONG1
                stack.append(value.decode() if is_text else int.from_bytes(value, "little", signed=True))
        elif opcode == pickle.MEMOIZE:
            memo.append(stack[-1])
        elif opcode in _TUPLES:
            first = len(stack) - _TUPLES[opcode]
            stack[first:] = [tuple(stack[first:])]
        elif opcode in _OPERATIONS:
            value, target = stack.pop(), stack.pop()
            stack.append(_OPERATIONS[opcode](target, value))
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode == pickle.EMPTY_DICT:
            stack.append({})
        elif opcode == pickle.EMPTY_LIST:
            stack.append([])
        elif opcode == pickle.MARK:
            marks.append(len(stack))
        elif opcode == pickle.APPEND:
            value = stack.pop()
            list.append(stack[-1], value)
        elif opcode == pickle.SETITEM:
            value, key = stack.pop(), stack.pop()
            _set_items(stack[-1], [key, value])
        elif opcode != pickle.STOP:
            first = marks.pop()
            values = stack[first:]
            del stack[first:]
            if opcode == pickle.TUPLE:
                stack.append(tuple(values))
            elif opcode == pickle.APPENDS:
                list.extend(stack[-1], values)
            else:
                _set_items(stack[-1], values)
    return stack.pop()


def _set_items(target: dict[Any, Any], values: list[Any]) -> None:
    # Keys of other types are refused: the hash of tuples in tuples can take 2**100 steps.
    for key, value in zip(values[::2], values[1::2], strict=True):
        dict.__setitem__(target, key if type(key) is _Record else _typed(key, str), value)


def _named(module: Any, name: Any) -> Any:
    """Return a dtype of torch, or a name that torch writes."""
    named = _Name(_typed(module, str), _typed(name, str))
    dtype = vars(torch).get(name) if module == "torch" else None
    if isinstance(dtype, torch.dtype):
        return dtype
    if name not in _RECORDS.get(module, ()) and name not in _FUNCTIONS.get(module, ()):
        text = f"{module}.{name}"
        raise CheckpointDamagedError(f"the metadata of the tensors names {text:.200}, and only tensors are read")
    return named


def _called(function: Any, arguments: Any) -> Any:
    """Return the shape that ``torch.Size`` would return, an empty dict, or None for values that are not used."""
    function = _typed(function, _Name)
    if function.name not in _FUNCTIONS.get(function.module, ()):
        raise ValueError(f"a call of {function.name}")
    if function.name == "Size":
        (shape,) = _typed(arguments, tuple)
        return _shape(shape)
    return {} if function.name == "OrderedDict" else None


def _new(name: Any, arguments: Any) -> _Record:
    name = _typed(name, _Name)
    if name.name not in _RECORDS.get(name.module, ()) or len(_typed(arguments, tuple)) > 0:
        raise ValueError(f"an instance of {name.name}")
    return _Record(name.name)


def _built(record: Any, state: Any) -> _Record:
    instance = _typed(record, _Record)
    if instance.state is not None:
        raise ValueError(f"a second state of {instance.kind}")
    instance.state = state
    return instance


_OPERATIONS = {pickle.STACK_GLOBAL: _named, pickle.REDUCE: _called, pickle.NEWOBJ: _new, pickle.BUILD: _built}


def _typed(value: Any, expected: type[T]) -> T:
    if type(value) is not expected:
        raise TypeError(f"{type(value).__name__} in place of {expected.__name__}")
    return value


def _fields(record: Any, kind: str) -> dict[Any, Any]:
    if _typed(record, _Record).kind != kind:
        raise TypeError(f"{record.kind} in place of {kind}")
    return _typed(record.state, dict)


def _number(value: Any) -> int:
    number = _typed(value, int)
    if not 0 <= number < 2**63:
        raise ValueError("a number that is negative or above 2**63")
    return number


def _shape(value: Any) -> torch.Size:
    if len(value) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {len(value)} dimensions")
    return torch.Size([_number(size) for size in value])


def _tensor(record: Any) -> TensorStorageMetadata:
    fields = _fields(record, "TensorStorageMetadata")
    properties = _typed(fields["properties"], _Record)
    dtype, *_ = _typed(properties.state, tuple)
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in _typed(fields["chunks"], list)]
    fields["chunks"].clear()  # a list that many tensors share is converted once
    return TensorStorageMetadata(
        TensorProperties(dtype=_typed(dtype, torch.dtype)),
        _typed(fields["size"], torch.Size),
        [
            ChunkStorageMetadata(_typed(chunk["offsets"], torch.Size), _typed(chunk["sizes"], torch.Size))
            for chunk in chunks
        ],
    )


def _index(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset, number = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _typed(fields["fqn"], str),
        None if offset is None else _typed(offset, torch.Size),
        None if number is None else _number(number),
    )


def _file(record: Any) -> _StorageInfo:
    fields = _fields(record, "_StorageInfo")
    name = _typed(fields["relative_path"], str)
    if set(name) & set("/\\\0") or name in ("", ".", ".."):
        raise CheckpointDamagedError(f"the metadata of the tensors names a file {name!r:.80}")
    return _StorageInfo(name, _number(fields["offset"]), _number(fields["length"]))
