"""Sample data for the pages of the documentation, in place of the data that a reader has.

Pages use it in hidden preparations, so that they show the code of a reader and nothing else.
"""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def parquet(path: str, group: int = 100, **columns: Iterable[Any]) -> None:
    """Write a Parquet file, with row groups of ``group`` rows."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {name: values if isinstance(values, np.ndarray) else list(values) for name, values in columns.items()}
    )
    pq.write_table(table, path, row_group_size=group)


def arrow(path: str, block: int, **columns: Iterable[Any]) -> None:
    """Write an Arrow stream, with record batches of ``block`` rows."""
    table = pa.table({name: list(values) for name, values in columns.items()})
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=block)


def parts(folder: str, files: int = 4, rows: int = 250, group: int = 50) -> None:
    """Write Parquet files of rows that are numbered over all files, with a text and eight tokens each."""
    for part in range(files):
        ids = range(rows * part, rows * part + rows)
        columns = {"id": ids, "text": (f"row {i}" for i in ids), "tokens": ([i] * 8 for i in ids)}
        parquet(f"{folder}/part-{part}.parquet", group, **columns)


def tokenizer(*words: str) -> Any:
    """Return a ``transformers`` tokenizer of these words, after ``<pad>`` (0) and ``</s>`` (1)."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(("<pad>", "</s>", *words))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def llama(vocabulary: int, **options: Any) -> Any:
    """Return a very small Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes, **options))


def hub_folder(name: str, config: str, files: int = 4, rows: int = 250) -> None:
    """Write a folder that ``datasets.load_dataset`` opens like a dataset of the Hub."""
    parts(name, files, rows)
    Path(name, "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files: '*.parquet'\n---\n")


def images(folder: str, count: int, classes: Sequence[str] = ("cat", "dog")) -> None:
    """Write JPEGs of different sizes, one folder for each class."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for i in range(count):
        path = Path(folder, classes[i % len(classes)], f"{i}.jpg")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (60 + i, 80, 3), dtype=np.uint8)).save(path)


def tar_shards(folder: str, shards: int = 4, samples: int = 50) -> None:
    """Write tar shards, each sample with an image, a class, a caption, JSON and an array."""
    from PIL import Image

    Path(folder).mkdir()
    for shard in range(shards):
        with tarfile.open(f"{folder}/train-{shard:06d}.tar", "w") as tar:
            for number in range(samples * shard, samples * shard + samples):
                image, array = io.BytesIO(), io.BytesIO()
                Image.new("RGB", (300, 260), (number % 256, 0, 0)).save(image, format="JPEG")
                np.save(array, np.full(3, number))
                files = {"jpg": image.getvalue(), "cls": str(number % 10).encode(), "txt": f"caption {number}".encode()}
                files |= {"json": json.dumps({"number": number}).encode(), "npy": array.getvalue()}
                for extension, contents in files.items():
                    info = tarfile.TarInfo(f"{number:06d}.{extension}")
                    info.size = len(contents)
                    tar.addfile(info, io.BytesIO(contents))


def mds(folder: str, rows: int = 1000) -> None:
    """Write MDS shards as Mosaic Streaming does."""
    from shard_files import write_mds

    columns = {"id": "int", "meta": "json", "text": "str", "tokens": "ndarray:int32"}
    made: list[Mapping[str, Any]] = [
        {"id": i, "meta": json.dumps({"url": f"page {i}"}), "text": f"row {i}", "tokens": [i] * 8} for i in range(rows)
    ]
    write_mds(Path(folder), columns, made, shard=250)


def litdata(folder: str, rows: int = 1000) -> None:
    """Write chunks of rows as LitData does."""
    from shard_files import write_litdata

    write_litdata(Path(folder), [{"id": i, "text": f"row {i}", "x": [i] * 8} for i in range(rows)], chunk=400)


def litdata_tokens(folder: str) -> None:
    """Write a chunk of 100 documents of tokens, as LitData does for its ``TokensLoader``."""
    from shard_files import with_offsets

    documents = [np.full(10 + i % 5, i, np.int32) for i in range(100)]
    data, name = with_offsets([each.tobytes() for each in documents]), "chunk-0-0.bin"
    Path(folder).mkdir()
    Path(folder, name).write_bytes(data)
    chunk = {"chunk_bytes": len(data), "chunk_size": 100, "dim": sum(map(len, documents)), "filename": name}
    spec = json.dumps([1, {"type": None, "context": None, "children_spec": []}])
    config = {"compression": None, "data_format": ["no_header_numpy:2"], "data_spec": spec, "encryption": None}
    index = {"chunks": [chunk], "config": config | {"item_loader": "TokensLoader"}}
    Path(folder, "index.json").write_text(json.dumps(index, sort_keys=True))


def megatron(prefix: str, start: int) -> None:
    """Write 300 documents of random tokens from ``start`` on as Megatron's ``.bin`` and ``.idx``."""
    rng = np.random.default_rng(start)
    documents = [start + rng.integers(0, 30_000, rng.integers(10, 200)) for _ in range(300)]
    lengths = [len(document) for document in documents]
    np.concatenate(documents).astype(np.uint16).tofile(f"{prefix}.bin")
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * 2
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1))
        file.write(np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
