"""Arrays of torch, numpy and JAX alike: what they are, their bytes, and back from bytes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

# Names as safetensors has them. What has none is kept as bytes (U8), with its own dtype beside it.
SAFE = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "float32": ("F32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float64": ("F64", 8),
}


class UnsupportedError(TypeError):
    """An array that cannot be kept as plain bytes."""


@dataclass(frozen=True)
class Kind:
    """Everything of an array but its bytes. ``library`` is torch, numpy, jax, or "key" for a typed JAX key."""

    library: str
    dtype: str
    shape: tuple[int, ...]
    impl: str = ""
    weak: bool = False  # a JAX number that takes the dtype of what it meets

    @property
    def nbytes(self) -> int:
        size = self.itemsize
        for length in self.shape:
            size *= length
        return size

    @property
    def itemsize(self) -> int:
        return SAFE[self.dtype][1] if self.dtype in SAFE else _numpy_dtype(self.dtype).itemsize


def is_array(value: Any) -> bool:
    """Whether this is an array or tensor of a library that is in use."""
    return isinstance(value, (np.ndarray, np.generic)) or _is_torch(value) or _is_jax(value)


def kind_of(value: Any, *, distributed: bool = False) -> Kind:
    """What an array is. Raises UnsupportedError, with the way out, for what cannot be kept as bytes."""
    if _is_torch(value):
        return _kind_of_torch(value, distributed)
    if _is_jax(value):
        return _kind_of_jax(value, distributed)
    if value.dtype.hasobject or value.dtype.names or value.dtype.type is np.void:
        raise UnsupportedError(f"a numpy array of dtype {value.dtype}")
    if isinstance(value, np.ma.MaskedArray):
        raise UnsupportedError("a masked numpy array")
    return Kind("numpy", _dtype_name(value.dtype), tuple(value.shape))


def bytes_of(value: Any) -> Bytes:
    """The bytes of an array in host memory: without a copy where they lie there in a row already."""
    if _is_torch(value):
        torch = sys.modules["torch"]
        tensor = value.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        tensor = tensor.cpu().contiguous().reshape(-1)
        return np.asarray(tensor.view(torch.uint8).numpy()) if tensor.numel() else np.empty(0, np.uint8)
    if _is_jax(value):
        jax = sys.modules["jax"]
        value = np.asarray(jax.random.key_data(value) if _is_key(value) else value)
    flat = np.ascontiguousarray(value).reshape(-1)
    if not flat.dtype.isnative:
        flat = flat.astype(flat.dtype.newbyteorder("="))
    return flat.view(np.uint8) if flat.size else np.empty(0, np.uint8)


def make(kind: Kind, data: Bytes) -> Any:
    """An array of this kind over these bytes; of torch and numpy without a copy."""
    if kind.library == "torch":
        return _torch_over(kind, data)
    array = data.view(_numpy_dtype(kind.dtype)).reshape(kind.shape)
    if kind.library == "numpy":
        return array
    try:
        import jax
    except ImportError:
        return array
    copied = jax.numpy.asarray(array.item()) if kind.weak and not kind.shape else jax.numpy.array(array)
    if copied.dtype != array.dtype:
        return array  # 64 bits, where JAX has been told to have 32: to be refused, not to be cut
    return jax.random.wrap_key_data(copied, impl=kind.impl) if kind.library == "key" else copied


def is_sharded(tensor: Any) -> bool:
    """Whether this is a tensor of torch over several processes, or a parameter of such."""
    return any(type(one).__name__ == "DTensor" for one in (tensor, getattr(tensor, "data", None)))


def _is_torch(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_jax(value: Any) -> bool:
    jax: Any = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array)


def _is_key(value: Any) -> bool:
    jax: Any = sys.modules["jax"]
    return bool(jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key))


def _kind_of_torch(tensor: Any, distributed: bool) -> Kind:
    torch: Any = sys.modules["torch"]
    if is_sharded(tensor) and not distributed:
        raise UnsupportedError('a sharded tensor (DTensor), which PipelineCheckpoint(…, backend="dcp") keeps')
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedError(f"a {'quantized' if tensor.is_quantized else 'sparse'} tensor")
    if tensor.device.type == "meta":
        raise UnsupportedError("a tensor on the meta device, which has no values")
    return Kind("torch", str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _kind_of_jax(array: Any, distributed: bool) -> Kind:
    jax: Any = sys.modules["jax"]
    if not distributed and not array.is_fully_addressable and not array.is_fully_replicated:
        raise UnsupportedError('an array over several processes, which PipelineCheckpoint(…, backend="orbax") keeps')
    if _is_key(array):
        data = jax.random.key_data(array)
        return Kind("key", str(data.dtype), tuple(data.shape), str(jax.random.key_impl(array)))
    return Kind("jax", _dtype_name(array.dtype), tuple(array.shape), weak=bool(array.weak_type and not array.shape))


def _torch_over(kind: Kind, data: Bytes) -> Any:
    try:
        import torch
    except ImportError:
        return data.view(_numpy_dtype(kind.dtype)).reshape(kind.shape)
    dtype = getattr(torch, kind.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {kind.dtype!r}")
    if not len(data):
        return torch.empty(kind.shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(kind.shape)


def _dtype_name(dtype: Any) -> str:
    """A name that ``np.dtype`` understands again: "float32", "bfloat16", "<U5", "<M8[ns]"."""
    dtype = np.dtype(dtype)
    if dtype.kind in "USMm":
        return str(dtype.newbyteorder("=").str)
    return str(dtype.name)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name)
    except TypeError:
        import ml_dtypes  # comes with JAX: bfloat16 and the 8-bit floats

        dtype = np.dtype(getattr(ml_dtypes, name))
    if dtype.hasobject or dtype.names or not dtype.itemsize:
        raise ValueError(f"no dtype of plain numbers: {name!r}")
    return dtype
