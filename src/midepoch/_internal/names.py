"""Names that people expect in the package and do not exist, with what to use instead."""

from __future__ import annotations

NAMES = {
    "DataLoader": "Use ds.loader(batch_size, num_workers=…).",
    "IterableDataset": "Use midepoch.Dataset, which is iterable.",
    "DatasetDict": "Open one split: load_dataset(…, split='train').",
    "Features": "Use datasets.Features, or Arrow types with ds.cast(…).",
    "ClassLabel": "Use ds.class_encode_column(column).",
    "Value": "Use Arrow types with ds.cast({'label': 'int32'}).",
    "open": "Use load_dataset, load_from_disk or from_files.",
    "read_parquet": "Use midepoch.from_files('*.parquet').",
    "from_parquet": "Use midepoch.from_files('*.parquet').",
    "read_delta": "Use midepoch.from_delta(uri).",
    "read_lance": "Use midepoch.from_lance(uri).",
    "read_iceberg": "Use midepoch.from_iceberg('catalog.namespace.table').",
    "from_csv": "Use midepoch.from_files('*.csv').",
    "from_json": "Use midepoch.from_files('*.jsonl').",
    "from_dict": "Data is read from files. Write it once, for example with pyarrow.parquet.write_table.",
    "from_list": "Data is read from files. Write it once, for example with pyarrow.parquet.write_table.",
    "from_generator": "Data is read from files. Write it once, for example with pyarrow.parquet.write_table.",
    "from_pandas": "Data is read from files. Write it once, for example with frame.to_parquet(path).",
    "chain": "Use midepoch.concat([a, b]).",
    "interleave": "Use midepoch.mix([a, b], weights=…).",
    "Checkpoint": "Use midepoch.PipelineCheckpoint, or midepoch.checkpoint.",
    "random_split": "Use ds.train_test_split(test_size=0.1, seed=0), or ds.slice(None, '90%') and ds.slice('90%').",
}
"""Names that do not exist in the package."""
