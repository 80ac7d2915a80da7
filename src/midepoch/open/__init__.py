"""Opening data: files of any format, Hugging Face datasets, tables, and tokenized files."""

from midepoch.open.files import DEFAULT_CACHE_BYTES, from_files, load_dataset, load_from_disk

__all__ = ["DEFAULT_CACHE_BYTES", "from_files", "load_dataset", "load_from_disk"]
