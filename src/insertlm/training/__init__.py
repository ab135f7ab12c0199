"""A run: rows, steps, the optimiser, processes, metrics, saving.

May import evaluation, model and all below it.
"""
