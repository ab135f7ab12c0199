"""Where models are kept and how: run folders, checkpoints, the Hub, rounded weights.

May import recipe and all below it.
"""
