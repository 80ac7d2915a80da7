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
    "from_polars": "Use midepoch.from_pandas(frame), which also takes frames of polars.",
    "from_table": "Use midepoch.from_arrow(table).",
    "from_numpy": "Use midepoch.from_dict({'x': array}).",
    "from_tensors": "Use midepoch.from_dict({'x': tensor}), or midepoch.from_map_style(dataset).",
    "from_torch": "Use midepoch.from_map_style(dataset).",
    "from_dataset": "Use midepoch.from_hf(ds) for Hugging Face, or midepoch.from_map_style(ds) for any ds[i].",
    "from_datasets": "Use midepoch.from_hf(ds).",
    "from_huggingface": "Use midepoch.from_hf(ds).",
    "from_text": "Use midepoch.from_files('*.txt').",
    "from_spark": "Write the frame once: df.write.parquet(folder), and use midepoch.from_files(folder).",
    "from_sql": "Use midepoch.from_pandas(pandas.read_sql(…)), or midepoch.from_generator(function).",
    "TensorDataset": "Use midepoch.from_dict({'x': tensor}), or midepoch.from_map_style(dataset).",
    "WebDataset": "Use midepoch.from_files('shards/{000000..000146}.tar').",
    "from_webdataset": "Use midepoch.from_files('shards/{000000..000146}.tar').",
    "chain": "Use midepoch.concat([a, b]).",
    "interleave": "Use midepoch.mix([a, b], weights=…).",
    "Checkpoint": "Use midepoch.PipelineCheckpoint, or midepoch.checkpoint.",
    "random_split": "Use ds.train_test_split(test_size=0.1, seed=0), or ds.slice(None, '90%') and ds.slice('90%').",
}
"""Names that do not exist in the package."""
