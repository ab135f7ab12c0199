"""The network: its description, the transformer, attention with its backends and caches, kernels, losses, adapters.

May import core. Works on token ids, positions and what each row may see; knows neither texts nor tasks.
"""
