"""Arrays of torch, numpy and JAX alike: what they are, their bytes, and back from bytes."""

from __future__ import annotations

import sys
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.ma import MaskedArray  # here, as numpy imports it when it is first used: in a signal handler, at worst

from midepoch.imports import loaded

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


class IncompleteError(UnsupportedError):
    """An array with values that this process does not hold: no pickle of it would have them either."""


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


def kind_of(value: Any, *, distributed: Container[str] = ()) -> Kind:
    """Everything of an array but its bytes. Raises UnsupportedError for an array that cannot be kept as bytes.

    ``distributed``: the libraries ("torch", "jax") whose arrays may lie on several processes.
    """
    check_complete(value, distributed=distributed)
    if _is_torch(value):
        return _kind_of_torch(value)
    if _is_jax(value):
        return _kind_of_jax(value)
    if value.dtype.hasobject or value.dtype.names or value.dtype.type is np.void:
        raise UnsupportedError(f"a numpy array of dtype {value.dtype}")
    if isinstance(value, MaskedArray):
        raise UnsupportedError("a masked numpy array")
    return Kind("numpy", _dtype_name(value.dtype), tuple(value.shape))


def check_complete(value: Any, *, distributed: Container[str] = ()) -> None:
    """Raise IncompleteError for an array of which this process does not hold all values."""
    if _is_torch(value):
        _check_complete_torch(value, distributed)
    elif _is_jax(value) and "jax" not in distributed and not (value.is_fully_addressable or value.is_fully_replicated):
        raise IncompleteError(
            "an array over several processes, of which this process holds only a part. "
            'Pass backend="orbax" to PipelineCheckpoint, which keeps such models and optimizers.'
        )


def bytes_of(value: Any) -> Bytes:
    """The bytes of an array in host memory: without a copy where they lie there in a row already."""
    if _is_torch(value):
        tensor = value.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        tensor = tensor.cpu().contiguous()
        return np.asarray(flat_bytes(tensor).numpy()) if tensor.numel() else np.empty(0, np.uint8)
    if _is_jax(value):
        jax = sys.modules["jax"]
        value = np.asarray(jax.random.key_data(value) if _is_key(value) else value)
    flat = np.ascontiguousarray(value).reshape(-1)
    if not flat.dtype.isnative:
        flat = flat.astype(flat.dtype.newbyteorder("="))
    return flat.view(np.uint8) if flat.size else np.empty(0, np.uint8)


def flat_bytes(tensor: Any) -> Any:
    """The bytes of a contiguous tensor, as a tensor over the same memory."""
    # Not reshape(-1): a tensor of one value counts as contiguous with any stride, which view() refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(sys.modules["torch"].uint8)


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
    """True for a tensor of torch over several processes, or a parameter of such."""
    return _is_of(tensor, "DTensor") or _is_of(getattr(tensor, "data", None), "DTensor")


def is_flattened(tensor: Any) -> bool:
    """True for a parameter that FullyShardedDataParallel has cut: a plain tensor, which it marks."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


def _is_of(value: Any, name: str) -> bool:
    """True for an instance of one of torch's own classes, by name: importing its module takes a second."""
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


def _check_complete_torch(tensor: Any, distributed: Container[str]) -> None:
    if _is_of(tensor, "ShardedTensor"):
        raise IncompleteError(
            "a ShardedTensor, of which this process holds only a part. Use tensors that torch shards as DTensor: "
            'fully_shard, or FullyShardedDataParallel with a device_mesh, and backend="dcp" of PipelineCheckpoint.'
        )
    if (is_sharded(tensor) and "torch" not in distributed) or is_flattened(tensor):
        raise IncompleteError(
            f"a sharded tensor ({type(tensor).__name__}), of which this process may hold only a part. "
            'Pass backend="dcp" to PipelineCheckpoint, which keeps sharded models and optimizers.'
        )
    if tensor.device.type == "meta" or _is_of(tensor, "FakeTensor"):
        raise IncompleteError(
            "a tensor on the meta device or a FakeTensor, which has no values. Initialise the model first "
            '(to_empty, then its values), or pass backend="dcp" to PipelineCheckpoint if other ranks hold them.'
        )


def _kind_of_torch(tensor: Any) -> Kind:
    torch: Any = sys.modules["torch"]
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedError(f"a {'quantized' if tensor.is_quantized else 'sparse'} tensor")
    return Kind("torch", str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _kind_of_jax(array: Any) -> Kind:
    jax: Any = sys.modules["jax"]
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
