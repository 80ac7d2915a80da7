"""The main job, shown: train, be killed in mid-epoch, resume with other workers, prove that nothing was lost.

Run with ``scripts/demo`` or ``python -m midepoch.demo``.
"""
