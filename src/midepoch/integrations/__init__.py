"""Adapters for training frameworks: one module for each, which alone imports that package.

Plain PyTorch, DDP, FSDP2, StatefulDataLoader, JAX and Ray Train need no adapter: docs/trainer.md.
"""
