"""What an installed midepoch does with an extra alone: run by scripts/release in an environment that has nothing else.

python smoke.py core | torch | hf | jax | store | ray | transformers | accelerate | lightning | trl | cli | media | demo | all
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import midepoch

ROWS = 100


def write(folder: Path) -> Path:
    path = folder / "data.arrow"
    table = pa.table({"id": np.arange(ROWS), "x": np.arange(ROWS, dtype=np.float32)})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    pq.write_table(table, folder / "data.parquet", row_group_size=9)
    return path


def resumes(make: Any) -> list[Any]:
    """Some batches, and those that another loader goes on with: together an epoch, each row once."""
    loader = make()
    batches = [batch for _, batch in zip(range(4), loader, strict=False)]
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    other = make()
    other.load_state_dict(state)
    batches += list(other)
    other.close()
    assert sorted(int(i) for batch in batches for i in batch["id"]) == list(range(ROWS))
    return batches


def core(folder: Path) -> None:
    """Without any extra: Arrow and Parquet, workers, checkpoints, and no word of torch."""
    assert midepoch.__version__ == importlib.metadata.version("midepoch")
    path = write(folder)
    for file in (path, folder / "data.parquet"):
        for workers in (0, 2):
            ds = midepoch.from_files(file, index_dir=folder / "index").shuffle(seed=1).map(dict)
            resumes(lambda ds=ds, workers=workers: ds.with_format("numpy").loader(7, num_workers=workers))
    kept = midepoch.from_files(path).filter(odd).with_format("numpy").loader(5)
    next(iter(kept))
    midepoch.PipelineCheckpoint(folder / "checkpoints").save(kept, step=1)
    again = midepoch.from_files(path).filter(odd).with_format("numpy").loader(5)
    assert midepoch.PipelineCheckpoint(folder / "checkpoints").restore_latest(again) == 1
    assert next(iter(again))["id"].tolist() == [11, 13, 15, 17, 19]
    import fast_hf_loader_simple

    assert fast_hf_loader_simple.__name__


def odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


def torch(folder: Path) -> None:
    """Batches are tensors, and a model is saved beside them."""
    import torch

    ds = midepoch.from_files(write(folder)).shuffle(seed=1)
    assert all(isinstance(batch["x"], torch.Tensor) for batch in resumes(lambda: ds.loader(7)))
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    checkpoint = midepoch.PipelineCheckpoint(folder / "checkpoints")
    checkpoint.save(ds.loader(7), model, step=3)
    assert checkpoint.restore_latest(ds.loader(7), other) == 3
    assert torch.equal(model.weight, other.weight)


def hf(folder: Path) -> None:
    """What ``datasets`` prepares is read where it lies, and the Hub's client is one that midepoch uses."""
    write(folder)
    files, cache = str(folder / "data.parquet"), str(folder / "cache")
    ds = midepoch.load_dataset("parquet", data_files=files, cache_dir=cache, split="train[:50%]")
    assert [row["id"] for row in ds] == list(range(ROWS // 2))
    from midepoch.storage.addresses import resolve

    assert resolve("hf://datasets/org/name")[0].scheme == "hf://"


def jax(folder: Path) -> None:
    """Batches are arrays of JAX, and Orbax saves."""
    import jax

    ds = midepoch.from_files(write(folder)).shuffle(seed=1).with_format("jax")
    assert all(isinstance(batch["x"], jax.Array) for batch in resumes(lambda: ds.loader(7)))
    checkpoint = midepoch.PipelineCheckpoint(folder / "checkpoints", backend="orbax")
    checkpoint.save(ds.loader(7), {"weights": jax.numpy.ones(3)}, step=3)
    found = {"weights": jax.numpy.zeros(3)}
    assert checkpoint.restore_latest(ds.loader(7), found) == 3
    assert found["weights"].tolist() == [1, 1, 1]


def store(folder: Path) -> None:
    """Any file system of fsspec, functions of a script in spawned workers, checkpoints by obstore."""
    import fsspec

    write(folder)
    memory = fsspec.filesystem("memory")
    memory.pipe("/lake/data.parquet", (folder / "data.parquet").read_bytes())
    assert [row["id"] for row in midepoch.from_files("memory://lake")] == list(range(ROWS))
    ds = midepoch.from_files(folder / "data.arrow").map(lambda row: {"twice": 2 * row["id"]}).with_format("numpy")
    with ds.loader(5, num_workers=1, multiprocessing_context="spawn") as loader:
        assert next(iter(loader))["twice"].tolist() == [0, 2, 4, 6, 8]
    checkpoint = midepoch.PipelineCheckpoint("memory:///run")
    checkpoint.save(ds.loader(5), step=3)
    assert checkpoint.restore_latest(ds.loader(5)) == 3


def ray(folder: Path) -> None:
    """An index made by Ray's workers is the one that is made without."""
    import ray

    from midepoch.integrations.ray import build_index

    write(folder)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    made = build_index(folder / "data.parquet", index_dir=folder / "by-ray")
    ray.shutdown()
    midepoch.from_files(folder / "data.parquet", index_dir=folder / "by-threads")
    assert made.read_bytes() == (folder / "by-threads" / made.name).read_bytes()


def delta(folder: Path) -> None:
    """A version of a table that stays, whatever is appended."""
    import deltalake
    import pyarrow as pa

    uri = str(folder / "table")
    for first in (0, ROWS):
        deltalake.write_deltalake(uri, pa.table({"id": range(first, first + ROWS)}), mode="append")
    resumes(lambda: midepoch.from_delta(uri, version=0).shuffle(seed=1).loader(10))
    assert len(midepoch.from_delta(uri)) == 2 * ROWS


def iceberg(folder: Path) -> None:
    """The package reads metadata files. A table needs a catalog to be written, which the extra does not bring."""
    from pyiceberg.exceptions import NoSuchTableError  # noqa: F401 (the package is there)

    try:
        midepoch.from_iceberg(str(folder / "metadata" / "v1.metadata.json"))
        said = "it was opened"
    except midepoch.DataNotFoundError as problem:
        said = str(problem)
    assert "v1.metadata.json" in said, said


def lance(folder: Path) -> None:
    """The rows of a table, without those that were deleted."""
    import lance
    import pyarrow as pa

    uri = str(folder / "rows.lance")
    lance.write_dataset(pa.table({"id": range(ROWS + 10)}), uri).delete(f"id >= {ROWS}")
    resumes(lambda: midepoch.from_lance(uri).shuffle(seed=1).loader(10))


def transformers(folder: Path) -> None:
    """A Trainer that goes on in the data where it was."""
    import torch
    from transformers import TrainingArguments

    from midepoch.integrations.transformers import ResumableTrainer

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: Any, id: Any) -> Any:
            seen.append(id.tolist())
            return {"loss": self.layer(x[:, None]).square().mean()}

    seen: list[list[int]] = []
    ds = midepoch.from_files(write(folder)).shuffle(seed=1)
    for steps in (3, 6):
        out = str(folder / "out")
        args = TrainingArguments(out, per_device_train_batch_size=10, max_steps=steps, save_steps=3, use_cpu=True)
        args.report_to, args.remove_unused_columns = [], False
        ResumableTrainer(Model(), args, train_dataset=ds).train(resume_from_checkpoint=steps > 3)
    assert seen == [batch["id"].tolist() for _, batch in zip(range(6), ds.loader(10), strict=False)]


def accelerate(folder: Path) -> None:
    """``save_state`` holds the place in the data."""
    from accelerate import Accelerator

    from midepoch.integrations.accelerate import prepare

    accelerator, ds = Accelerator(cpu=True), midepoch.from_files(write(folder)).shuffle(seed=1)
    first = iter(prepare(accelerator, ds.loader(10)))
    next(first)
    accelerator.save_state(str(folder / "state"))
    expected = next(first)["id"].tolist()
    del first
    accelerator.load_state(str(folder / "state"))
    other = ds.loader(10)
    other.load_state_dict(json.loads((folder / "state" / "midepoch-train.json").read_text()))
    assert next(iter(other))["id"].tolist() == expected


def lightning(folder: Path) -> None:
    """``fit`` goes on in the data where its checkpoint was saved."""
    import lightning.pytorch as pl
    import torch

    from midepoch.integrations.lightning import ResumableData

    class Model(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            seen.append(batch["id"].tolist())
            return self.layer(batch["x"][:, None]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    seen: list[list[int]] = []
    ds, saved = midepoch.from_files(write(folder)).shuffle(seed=1), str(folder / "saved.ckpt")
    for steps in (3, 6):
        quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        trainer = pl.Trainer(accelerator="cpu", max_steps=steps, **quiet)
        trainer.fit(Model(), datamodule=ResumableData(lambda: ds.loader(10)), ckpt_path=saved if steps > 3 else None)
        trainer.save_checkpoint(saved)
    assert seen == [batch["id"].tolist() for _, batch in zip(range(6), ds.loader(10), strict=False)]


def trl(folder: Path) -> None:
    """GRPO that goes on with the prompts that were not trained on."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig

    from midepoch.integrations.trl import ResumableGRPOTrainer

    words = Tokenizer(models.WordLevel({str(number): number for number in range(8)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", padding_side="left")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    pq.write_table(pa.table({"prompt": [str(number) for number in range(2, 8)]}), folder / "prompts.parquet")
    ds, seen = midepoch.from_files(folder / "prompts.parquet").shuffle(seed=1), []

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        seen.extend(prompts)
        return [float(len(each)) for each in completions]

    for steps in (2, 3):
        plain: Any = {"use_cpu": True, "bf16": False, "report_to": [], "max_completion_length": 2, "save_steps": 2}
        of_steps: Any = {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": steps}
        args = GRPOConfig(str(folder / "out"), **plain, **of_steps)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, pad_token_id=0, eos_token_id=1, **sizes))
        trainer = ResumableGRPOTrainer(model, reward, args, train_dataset=ds, processing_class=tokenizer)
        trainer.train(resume_from_checkpoint=steps > 2)
    assert seen == [str(row["prompt"]) for row in ds for _ in range(2)]


def cli(folder: Path) -> None:
    """The command is there, reads a ledger, and draws it; schedules are read and written as YAML."""
    ds = midepoch.from_files(write(folder)).with_format("numpy")
    list(ds.loader(7, audit=folder / "run"))
    command = str(Path(sys.executable).parent / "midepoch")
    said = subprocess.run(
        [command, "audit", str(folder / "run")], capture_output=True, text=True, check=True, timeout=300
    ).stdout
    assert "100" in said, said
    subprocess.run([command, "report", str(folder / "run"), "-o", str(folder / "report.html")], check=True, timeout=300)
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    schedule = midepoch.Schedule([midepoch.Phase("all", {"a": 3, "b": 1}, rows=8)])
    schedule.save(folder / "run.yaml")
    assert midepoch.Schedule.load(folder / "run.yaml") == schedule


def media(folder: Path) -> None:
    """Images and audio become arrays, without torch."""
    import io

    import soundfile
    from PIL import Image

    files = []
    for kind in ("JPEG", "PNG", "WEBP"):
        stream = io.BytesIO()
        Image.new("RGB", (40, 30), (250, 0, 0)).save(stream, kind)
        files.append(stream.getvalue())
    stream = io.BytesIO()
    soundfile.write(stream, np.zeros((800, 2), np.float32), 8000, format="WAV")
    table = pa.table({"image": files, "audio": [stream.getvalue()] * 3})
    pq.write_table(table, folder / "media.parquet")
    ds = midepoch.from_files(folder / "media.parquet").with_format("numpy")
    batch = next(ds.decode("image", size=16).decode("audio", "audio", sampling_rate=4000).loader(3))
    assert batch["image"].shape == (3, 3, 16, 16) and batch["image"][:, 0].min() > 240, batch["image"]
    assert batch["audio"].shape == (3, 2, 400), batch["audio"].shape


def demo(folder: Path) -> None:
    """It needs torch and hf as well, and says so."""
    command = [sys.executable, "-m", "midepoch.demo", "--rows", "6000"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    if importlib.util.find_spec("torch") and importlib.util.find_spec("datasets"):
        assert "bit for bit those of the uninterrupted run: yes" in done.stdout, done.stdout + done.stderr
    else:
        assert "midepoch[torch,hf,demo]" in done.stderr, done.stderr


EXTRAS = {
    "torch": torch,
    "hf": hf,
    "jax": jax,
    "store": store,
    "ray": ray,
    "transformers": transformers,
    "accelerate": accelerate,
    "lightning": lightning,
    "trl": trl,
    "cli": cli,
    "media": media,
    "delta": delta,
    "iceberg": iceberg,
    "lance": lance,
    "demo": demo,
}


def main(what: str) -> None:
    if what not in ("core", "all", *EXTRAS):
        sys.exit(f"there is no smoke test for {what}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name, check in {"core": core, **EXTRAS}.items():
        if name in ("core", what) or what == "all":
            with tempfile.TemporaryDirectory() as folder:
                os.environ["MIDEPOCH_CACHE"] = os.environ["HF_HOME"] = folder
                check(Path(folder))
                print(f"  {name}: ok", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
