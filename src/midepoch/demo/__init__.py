"""Demonstration: train, get killed in mid-epoch, resume with another number of workers, prove that nothing was lost.

Run with ``scripts/demo`` or ``python -m midepoch.demo``.
"""
