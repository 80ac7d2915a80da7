"""On a real GPU: pinned batches, checkpoints of what lies there and of its random generator, the loops people use.

They are left out unless asked for: scripts/test-gpu.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import midepoch
from midepoch.checkpoint import PipelineCheckpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="scripts/test-gpu, on a machine with a GPU")

ROWS, BATCH, STEPS = 96, 8, 20


@pytest.fixture
def ds(tmp_path: Path) -> midepoch.Dataset:
    values = np.random.default_rng(0).standard_normal((ROWS, 16), dtype=np.float32)
    pq.write_table(pa.table({"id": np.arange(ROWS), "x": list(values)}), tmp_path / "data.parquet", row_group_size=10)
    return midepoch.from_files(tmp_path / "data.parquet").shuffle(seed=3)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["rows", "map", "stream"])
def test_batches_are_pinned(kind: str, workers: int, ds: midepoch.Dataset) -> None:
    data: Any = {
        "rows": lambda: ds,
        "map": lambda: ds.map(lambda row: row),
        "stream": lambda: ds.filter(lambda row: row["id"] >= 0),
    }[kind]()
    torch.zeros(1, device="cuda")  # workers are forked from a process that uses the GPU
    loader = data.loader(BATCH, num_workers=workers, pin_memory=True)
    seen: list[int] = []
    copies: list[Any] = []
    for batch in loader:
        assert all(value.is_pinned() for value in batch.values())
        copies.append({name: value.to("cuda", non_blocking=True) for name, value in batch.items()})
        seen += batch["id"].tolist()
    torch.cuda.synchronize()
    assert copies
    assert seen == [row["id"] for row in data]
    values = torch.tensor(np.stack([row["x"] for row in data]))
    assert torch.equal(torch.cat([batch["x"] for batch in copies]).cpu(), values), "pages are not used again too soon"


def image(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.full((3, 128, 128), row["id"], np.uint8), "id": row["id"], "name": f"row {row['id']}"}


def nested(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ids = torch.tensor([row["id"] for row in rows])
    return {
        "deep": [{"x": torch.stack([torch.from_numpy(row["x"]) for row in rows])}, (ids, "text", None)],
        "half": ids.to(torch.bfloat16).repeat(2000, 1),
        "id": ids,
    }


@pytest.mark.parametrize(("workers", "kind"), [(0, "auto"), (2, "process"), (2, "thread")])
@pytest.mark.parametrize("pipeline", ["rows", "map", "stream"])
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_batches_are_on_the_device(device: str, pipeline: str, workers: int, kind: str, ds: midepoch.Dataset) -> None:
    data: Any = {"rows": ds, "map": ds.map(image), "stream": ds.filter(lambda row: row["id"] % 5 > 0)}[pipeline]
    expected = [(batch["id"].tolist(), loader_state) for batch, loader_state in _steps(data.loader(BATCH))]
    loader = data.loader(BATCH, num_workers=workers, worker_type=kind, device=device)
    busy = torch.randn(3000, 3000, device="cuda")
    kept, states = [], []
    for batch in loader:
        assert batch["id"].device == torch.device("cuda:0")
        busy = busy @ busy / 3000  # the caller's stream is far behind the copies
        kept.append({name: value * 1 if isinstance(value, torch.Tensor) else value for name, value in batch.items()})
        states.append(loader.state_dict())
    torch.cuda.synchronize()
    assert [(batch["id"].tolist(), state) for batch, state in zip(kept, states, strict=True)] == expected
    if pipeline == "map":
        for batch in kept:
            assert batch["x"].shape[1:] == (3, 128, 128)
            assert (batch["x"] == batch["id"].view(-1, 1, 1, 1)).all()
            assert batch["name"] == [f"row {i}" for i in batch["id"].tolist()]


def _steps(loader: midepoch.Loader) -> list[tuple[Any, Any]]:
    return [(batch, loader.state_dict()) for batch in loader]


def test_nothing_is_overwritten_while_the_gpu_still_reads(ds: midepoch.Dataset) -> None:
    """Many batches through few slots, which the GPU reads in place, with copies that wait behind a busy stream."""
    loader = ds.map(image).loader(BATCH, num_workers=2, prefetch=1, device="cuda", persistent_workers=True)
    sums = []
    for _ in range(5):
        for batch in loader:
            sums.append((batch["id"].sum() * 3 * 128 * 128, batch["x"].sum(dtype=torch.int64)))
    assert loader._sources._mover._registered._locked, "the slots are page-locked in place"
    torch.cuda.synchronize()
    assert len(sums) == 5 * ROWS // BATCH
    assert all(int(a) == int(b) for a, b in sums)
    locked = loader._sources._mover._registered._locked
    loader.close()
    del batch
    assert not locked, "and unlocked before they are unmapped"


def test_nested_values_of_any_type(ds: midepoch.Dataset) -> None:
    for workers in (0, 2):
        loader = ds.map(image).loader(BATCH, num_workers=workers, collate_fn=nested, device="cuda")
        for batch in loader:
            first, (ids, text, none) = batch["deep"]
            assert (text, none) == ("text", None)
            assert {ids.device.type, first["x"].device.type, batch["half"].device.type} == {"cuda"}
            assert batch["half"].dtype == torch.bfloat16
            assert (batch["half"][0] == ids.to(torch.bfloat16)).all()
            assert (first["x"] == ids.view(-1, 1, 1, 1)).all()


def test_a_device_that_is_not_there(ds: midepoch.Dataset) -> None:
    with pytest.raises(midepoch.MidepochError, match="only 1 GPUs"):
        ds.loader(BATCH, device="cuda:1")


class Training:
    """A model with dropout on the GPU: what it has become tells every batch and every random number it has seen."""

    def __init__(self, ds: midepoch.Dataset, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(16, 64), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(64, 1)]
        self.model = torch.nn.Sequential(*layers).cuda().bfloat16()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.loader = ds.loader(BATCH, pin_memory=True, **options)
        self.rows: list[list[int]] = []

    def run(self, first: int, last: int, saved: Callable[[int], None] = lambda step: None) -> None:
        step = first
        while step < last:
            for batch in self.loader:
                loss = self.model(batch["x"].cuda(non_blocking=True).bfloat16()).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.rows.append(batch["id"].tolist())
                step += 1
                saved(step)
                if step == last:
                    return

    def weights(self) -> list[torch.Tensor]:
        return [value.detach().cpu() for value in self.model.state_dict().values()]


@pytest.mark.parametrize("how", ["save", "async_save"])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_checkpoint_goes_on_bit_by_bit(how: str, workers: int, ds: midepoch.Dataset, tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path / "checkpoints", keep=None, async_save=how == "async_save")
    whole = Training(ds, num_workers=workers)
    # The next step changes the tensors while those of this one are still being written.
    whole.run(0, STEPS, lambda step: checkpoint.save(whole.loader, whole.model, whole.optimizer, step=step))
    checkpoint.wait()
    for step in range(1, STEPS, 3):
        torch.cuda.manual_seed_all(99)
        resumed = Training(ds, num_workers=workers)
        checkpoint.restore(resumed.loader, resumed.model, resumed.optimizer, step=step)
        assert all(value.is_cuda for value in resumed.model.parameters())
        resumed.run(step, STEPS)
        assert resumed.rows == whole.rows[step:], step
        assert all(map(torch.equal, resumed.weights(), whole.weights())), step


def test_saved_on_the_gpu_restored_without(ds: midepoch.Dataset, tmp_path: Path) -> None:
    training, checkpoint = Training(ds), PipelineCheckpoint(tmp_path / "checkpoints")
    training.run(0, 3)
    checkpoint.save(training.loader, training.model, training.optimizer, step=3)
    script = f"""
import torch, midepoch
from midepoch.checkpoint import PipelineCheckpoint
layers = [torch.nn.Linear(16, 64), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(64, 1)]
model = torch.nn.Sequential(*layers).bfloat16()
loader = midepoch.from_files({str(tmp_path / "data.parquet")!r}).shuffle(seed=3).loader({BATCH})
assert not torch.cuda.is_available()
assert PipelineCheckpoint({str(tmp_path / "checkpoints")!r}).restore_latest(loader, model) == 3
print(loader.position, float(sum(value.double().sum() for value in model.state_dict().values())))
"""
    command = ["env", "CUDA_VISIBLE_DEVICES=", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    position, total = done.stdout.split()
    assert int(position) == 3 * BATCH
    assert float(total) == float(sum(value.double().sum() for value in training.weights()))


def test_trainer_goes_on_bit_by_bit(ds: midepoch.Dataset, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from midepoch.integrations.transformers import ResumableTrainer

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.dropout = torch.nn.Linear(16, 1), torch.nn.Dropout(0.5)

        def forward(self, id: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
            seen.append(id.tolist())
            return {"loss": self.layer(self.dropout(x)).square().mean()}

    def train(checkpoint: Path | None) -> list[float]:
        torch.manual_seed(0)
        seen.clear()
        args = transformers.TrainingArguments(
            str(tmp_path / "trainer"), per_device_train_batch_size=BATCH, max_steps=STEPS, bf16=True, report_to=[],
            save_strategy="steps" if checkpoint is None else "no", save_steps=4, disable_tqdm=True,
            dataloader_num_workers=2, dataloader_pin_memory=True, logging_strategy="no",
        )  # fmt: skip
        trainer = ResumableTrainer(Model(), args, train_dataset=ds)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert next(trainer.model.parameters()).is_cuda
        return torch.cat([part.detach().ravel() for part in trainer.model.parameters()]).tolist()  # type: ignore[no-any-return]

    seen: list[list[int]] = []
    weights = train(None)
    whole = list(seen)
    for step in (4, 12, 16):
        assert train(tmp_path / "trainer" / f"checkpoint-{step}") == weights
        assert seen == whole[step:]


def test_accelerate_goes_on(ds: midepoch.Dataset, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from midepoch.integrations.accelerate import prepare

    def make() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator()
        model = torch.nn.Linear(16, 1)
        model = accelerator.prepare(model)
        return accelerator, model, prepare(accelerator, ds.loader(BATCH, num_workers=2, pin_memory=True))

    accelerator, _, loader = make()
    whole = []
    for step, batch in enumerate(loader, 1):
        assert batch["x"].is_cuda
        whole.append(batch["id"].tolist())
        if step == 5:
            accelerator.save_state(str(tmp_path / "state"))
    accelerator, _, loader = make()
    accelerator.load_state(str(tmp_path / "state"))
    assert [batch["id"].tolist() for batch in loader] == whole[5:]


def test_jax_arrays_are_on_the_gpu(tmp_path: Path, ds: midepoch.Dataset) -> None:
    """In a process of its own, which shares the GPU with this one."""
    pytest.importorskip("jax")
    script = f"""
import jax, midepoch
assert jax.default_backend() == "gpu", jax.devices()
ds = midepoch.from_files({str(tmp_path / "data.parquet")!r}).shuffle(seed=3)
for workers in (0, 2):
    seen = []
    for batch in ds.with_format("jax").loader({BATCH}, num_workers=workers):
        assert batch["x"].devices() == {{jax.devices()[0]}}
        seen += batch["id"].tolist()
    assert seen == [row["id"] for row in ds], workers
print("ok")
"""
    file = tmp_path / "job.py"
    file.write_text(script)
    command = ["env", "XLA_PYTHON_CLIENT_PREALLOCATE=false", sys.executable, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.strip() == "ok", done.stderr[-3000:]
