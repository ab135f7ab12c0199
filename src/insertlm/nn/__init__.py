"""The network: transformer, attention façade and its kernels, caches, CUDA graphs, losses.

May import core. Knows ids, positions and what a row may see; no batches of text, no tasks.
"""
