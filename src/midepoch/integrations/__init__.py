"""Glue to the training loops of other people: one module for each that needs some, which alone imports that package.

Plain PyTorch, DDP, FSDP2, StatefulDataLoader, JAX and Ray Train need none: docs/integrations.md.
"""
