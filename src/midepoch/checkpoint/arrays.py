"""Arrays of torch, numpy and JAX: their specification, their bytes, arrays made from bytes, and safetensors files.

A safetensors file has a length, a JSON header, and the bytes of all arrays. The format is simple enough to be written
here, one array at a time, so that nothing is copied or held twice; any safetensors library reads the files. Arrays are
ordered by item size, so that each is aligned in memory. When a model is restored they are read one at a time, so that
memory never holds a second copy of it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.ma import MaskedArray  # imported now: numpy would import it at first use, at worst in a signal handler

from midepoch._internal.values import loaded
from midepoch.checkpoint.files import Bytes, FileSource, Sink, run_in_threads
from midepoch.errors import CheckpointDamagedError

SAFETENSORS = {
    "bool": ("BOOL", 1), "uint8": ("U8", 1), "int8": ("I8", 1), "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1), "uint16": ("U16", 2), "int16": ("I16", 2), "float16": ("F16", 2),
    "bfloat16": ("BF16", 2), "uint32": ("U32", 4), "int32": ("I32", 4), "float32": ("F32", 4),
    "uint64": ("U64", 8), "int64": ("I64", 8), "float64": ("F64", 8),
}  # fmt: skip
"""Name and item size of a dtype in safetensors. Other dtypes are stored as bytes (U8), with their own dtype beside."""
_LARGEST_HEADER = 100_000_000  # as in the safetensors libraries
_READERS = 4
_CHUNK = 8 << 20


class UnsupportedError(TypeError):
    """An array that cannot be stored as plain bytes."""


class IncompleteError(UnsupportedError):
    """An array with values that this process does not hold: a pickle of it would lack them, too."""


@dataclass(frozen=True)
class ArraySpec:
    """Everything about an array except its bytes. ``library`` is torch, numpy, jax, or "key" for a typed JAX key."""

    library: str
    dtype: str
    shape: tuple[int, ...]
    impl: str = ""
    weak: bool = False  # a JAX scalar that adopts the dtype of its operand

    @property
    def nbytes(self) -> int:
        return self.itemsize * math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return SAFETENSORS[self.dtype][1] if self.dtype in SAFETENSORS else _numpy_dtype(self.dtype).itemsize


def is_array(value: Any) -> bool:
    """Return True for an array or tensor of a library that is in use."""
    return isinstance(value, (np.ndarray, np.generic)) or _is_torch(value) or _is_jax(value)


def spec_of(value: Any, *, distributed: Container[str] = ()) -> ArraySpec:
    """Return the specification of an array. Raises UnsupportedError if it cannot be stored as bytes.

    ``distributed``: the libraries ("torch", "jax") whose arrays may span several processes.
    """
    check_complete(value, distributed=distributed)
    if _is_torch(value):
        if value.layout != sys.modules["torch"].strided or value.is_quantized:
            raise UnsupportedError(f"a {'quantized' if value.is_quantized else 'sparse'} tensor")
        return ArraySpec("torch", str(value.dtype).removeprefix("torch."), tuple(value.shape))
    if _is_jax(value) and _is_key(value):
        jax: Any = sys.modules["jax"]
        data = jax.random.key_data(value)
        return ArraySpec("key", str(data.dtype), tuple(data.shape), str(jax.random.key_impl(value)))
    if _is_jax(value):
        weak = bool(value.weak_type and not value.shape)
        return ArraySpec("jax", _dtype_name(value.dtype), tuple(value.shape), weak=weak)
    if value.dtype.hasobject or value.dtype.names or value.dtype.type is np.void:
        raise UnsupportedError(f"a numpy array of dtype {value.dtype}")
    if isinstance(value, MaskedArray):
        raise UnsupportedError("a masked numpy array")
    return ArraySpec("numpy", _dtype_name(value.dtype), tuple(value.shape))


def check_complete(value: Any, *, distributed: Container[str] = ()) -> None:
    """Raise IncompleteError for an array of which this process does not hold all values."""
    if _is_torch(value):
        _check_complete_tensor(value, distributed)
    elif _is_jax(value) and "jax" not in distributed and not (value.is_fully_addressable or value.is_fully_replicated):
        raise IncompleteError(
            "an array over several processes, of which this process holds only a part. "
            'Pass backend="orbax" to PipelineCheckpoint, which saves such models and optimizers.'
        )


def bytes_of(value: Any) -> Bytes:
    """Return the bytes of an array in host memory: without a copy if they are contiguous there already."""
    if _is_torch(value):
        tensor = value.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        tensor = tensor.cpu().contiguous()
        return np.asarray(flat_bytes(tensor).numpy()) if tensor.numel() else np.empty(0, np.uint8)
    if _is_jax(value):
        value = np.asarray(sys.modules["jax"].random.key_data(value) if _is_key(value) else value)
    flat = np.ascontiguousarray(value).reshape(-1)
    if not flat.dtype.isnative:
        flat = flat.astype(flat.dtype.newbyteorder("="))
    return flat.view(np.uint8) if flat.size else np.empty(0, np.uint8)


def flat_bytes(tensor: Any) -> Any:
    """Return the bytes of a contiguous tensor, as a tensor over the same memory."""
    # Not reshape(-1): a tensor of one value counts as contiguous with any stride, which view() refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(sys.modules["torch"].uint8)


def make_array(spec: ArraySpec, data: Bytes) -> Any:
    """Return an array of this specification over these bytes; for torch and numpy without a copy."""
    if spec.library == "torch":
        return _tensor_over(spec, data)
    array = data.view(_numpy_dtype(spec.dtype)).reshape(spec.shape)
    if spec.library == "numpy":
        return array
    try:
        import jax
    except ImportError:
        return array
    copied = jax.numpy.asarray(array.item()) if spec.weak and not spec.shape else jax.numpy.array(array)
    if copied.dtype != array.dtype:
        return array  # 64 bits where JAX is set to 32: to be refused, not truncated
    return jax.random.wrap_key_data(copied, impl=spec.impl) if spec.library == "key" else copied


def is_sharded(tensor: Any) -> bool:
    """Return True for a torch tensor over several processes, or a parameter of one."""
    return _is_of(tensor, "DTensor") or _is_of(getattr(tensor, "data", None), "DTensor")


def is_flattened(tensor: Any) -> bool:
    """Return True for a parameter that FullyShardedDataParallel has cut: a plain tensor, which it marks."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


def _is_of(value: Any, name: str) -> bool:
    """Return True for an instance of one of torch's classes, by name: importing its module takes a second."""
    return any(base.__name__ == name and base.__module__.startswith("torch.") for base in type(value).__mro__)


def _is_torch(value: Any) -> bool:
    torch: Any = loaded("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_jax(value: Any) -> bool:
    jax: Any = loaded("jax")
    return jax is not None and isinstance(value, jax.Array)


def _is_key(value: Any) -> bool:
    jax: Any = sys.modules["jax"]
    return bool(jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key))


def _check_complete_tensor(tensor: Any, distributed: Container[str]) -> None:
    if _is_of(tensor, "ShardedTensor"):
        raise IncompleteError(
            "a ShardedTensor, of which this process holds only a part. Use tensors that torch shards as DTensor: "
            'fully_shard, or FullyShardedDataParallel with a device_mesh, and backend="dcp" of PipelineCheckpoint.'
        )
    if (is_sharded(tensor) and "torch" not in distributed) or is_flattened(tensor):
        raise IncompleteError(
            f"a sharded tensor ({type(tensor).__name__}), of which this process may hold only a part. "
            'Pass backend="dcp" to PipelineCheckpoint, which saves sharded models and optimizers.'
        )
    if tensor.device.type == "meta" or _is_of(tensor, "FakeTensor"):
        raise IncompleteError(
            "a tensor on the meta device or a FakeTensor, which has no values. Initialise the model first "
            '(to_empty, then its values), or pass backend="dcp" to PipelineCheckpoint if other ranks hold them.'
        )


def _tensor_over(spec: ArraySpec, data: Bytes) -> Any:
    try:
        import torch
    except ImportError:
        return data.view(_numpy_dtype(spec.dtype)).reshape(spec.shape)
    dtype = torch_dtype(spec.dtype)
    if not len(data):
        return torch.empty(spec.shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(spec.shape)


def torch_dtype(name: str) -> Any:
    """Return the dtype of this name. Raises ValueError if torch has none."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r:.40}")
    return dtype


def _dtype_name(dtype: Any) -> str:
    """Return a name that ``np.dtype`` accepts: "float32", "bfloat16", "<U5", "<M8[ns]"."""
    dtype = np.dtype(dtype)
    return str(dtype.newbyteorder("=").str if dtype.kind in "USMm" else dtype.name)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name)
    except TypeError:
        import ml_dtypes  # comes with JAX: bfloat16 and the 8-bit floats

        dtype = np.dtype(getattr(ml_dtypes, name))
    if dtype.hasobject or dtype.names or not dtype.itemsize:
        raise ValueError(f"no dtype of plain numbers: {name!r}")
    return dtype


def write_arrays(sink: Sink, arrays: Mapping[str, tuple[ArraySpec, Any]]) -> None:
    """Write arrays by name. At most one of them is copied at a time, and only if necessary."""
    ordered = sorted(arrays.items(), key=lambda item: -item[1][0].itemsize)
    header: dict[str, Any] = {}
    offset = 0
    for name, (spec, _) in ordered:
        known = spec.dtype in SAFETENSORS
        dtype, shape = (SAFETENSORS[spec.dtype][0], list(spec.shape)) if known else ("U8", [spec.nbytes])
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + spec.nbytes]}
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    sink.write(memoryview(len(text).to_bytes(8, "little") + text))
    for name, (spec, value) in ordered:
        data = bytes_of(value)
        if len(data) != spec.nbytes:
            raise ValueError(f"{name} changed its size while it was saved")
        sink.write(data.data)


def find_arrays(source: FileSource, specs: Iterable[tuple[str, ArraySpec]]) -> dict[str, StoredArray]:
    """Return the arrays of these names and specifications in a file, not read yet; raises CheckpointDamagedError."""
    offsets, body = _read_header(source)
    arrays: dict[str, StoredArray] = {}
    for name, spec in specs:
        start, stop = offsets.get(name, (0, -1))
        if stop - start != spec.nbytes:
            raise CheckpointDamagedError(f"the array {name!r:.80} has {stop - start} bytes, not {spec.nbytes}")
        arrays[name] = StoredArray(name, spec, source, body + start)
    return arrays


def _read_header(source: FileSource) -> tuple[dict[str, tuple[int, int]], int]:
    """Return the first and last byte of each array, and the offset that they count from."""
    size = int.from_bytes(_read_bytes(source, 0, min(8, source.size)), "little")
    body = 8 + size
    if source.size < 8 or size > min(_LARGEST_HEADER, source.size - 8):
        raise CheckpointDamagedError("this is not a safetensors file: its header is longer than the file")
    try:
        header = json.loads(_read_bytes(source, 8, size))
        length = source.size - body
        offsets = {name: _parse_offsets(entry, length) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise CheckpointDamagedError(f"this is not a safetensors file: {problem!r:.200}") from None
    return offsets, body


def _read_bytes(source: FileSource, start: int, size: int) -> bytes:
    data = bytearray(size)
    source.read_into(memoryview(data), start)
    return bytes(data)


def _parse_offsets(entry: Any, length: int) -> tuple[int, int]:
    start, stop = entry["data_offsets"]
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= length:
        raise ValueError(f"bytes {start!r:.40} to {stop!r:.40} of {length}")
    return start, stop


@dataclass(frozen=True, eq=False)
class StoredArray:
    """Array in a verified file."""

    name: str
    spec: ArraySpec
    source: FileSource
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def ndim(self) -> int:
        return len(self.spec.shape)

    def __getitem__(self, index: tuple[()]) -> StoredArray:
        """Return the scalar of an array without axes: the array itself."""
        return self

    def read(self) -> Any:
        """Return the array in new memory."""
        data = np.empty(self.spec.nbytes, np.uint8)
        self._fill(data)
        return make_array(self.spec, data)

    def read_into(self, target: Any) -> Any:
        """Fill a torch or numpy array of the same specification, and return it."""
        if self.spec.library == "numpy":
            self._fill(target.reshape(-1).view(np.uint8))
        elif not target.is_contiguous():
            target.detach().copy_(self.read())
        elif target.numel():
            flat = flat_bytes(target)
            if target.device.type == "cpu":
                self._fill(flat.numpy())
            else:
                self._fill_device(flat)
        return target

    def _fill(self, data: Bytes) -> None:
        starts = range(0, len(data), _CHUNK)
        threads = _READERS if len(starts) > 1 else 1
        run_in_threads(threads, lambda start: self._read(data[start : start + _CHUNK], start), starts)

    def _fill_device(self, flat: Any) -> None:
        torch: Any = sys.modules["torch"]
        chunk = np.empty(min(_CHUNK, len(flat)), np.uint8)
        for start in range(0, len(flat), _CHUNK):
            part = chunk[: len(flat) - start]
            self._read(part, start)
            flat[start : start + len(part)].copy_(torch.from_numpy(part))

    def _read(self, data: Bytes, start: int) -> None:
        if self.source.read_into(data.data, self.offset + start) != len(data):
            raise CheckpointDamagedError(f"the array {self.name!r:.80} ends too early")


def is_array_or_stored(value: Any) -> bool:
    """Return True for an array of any library, read or not."""
    return isinstance(value, StoredArray) or is_array(value)
