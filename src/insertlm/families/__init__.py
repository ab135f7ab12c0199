"""What corrupts, learns and writes: the ILM and its rivals, and what their writers share.

May import inference, nn, tasks.base, text and core.
"""
