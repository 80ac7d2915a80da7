"""Opening data that is in memory: tables, frames, lists, generators, Hugging Face datasets and map-style datasets."""
