"""Zebra puzzles: the task, its words, the generator with its kernels, the solver, and the cache of puzzles.

May import tasks.base, text and core.
"""
