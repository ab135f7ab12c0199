"""Decoding in ids: prompts, settings, constraints, sampling, writers, the decoding loop, the scheduler, trajectories.

May import nn and core. It knows families only as `Writer` (writer.py) and `Author` (engine.py).
"""
