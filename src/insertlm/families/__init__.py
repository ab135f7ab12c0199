"""Families of models, each a way to corrupt, learn and write: the ILM and its rivals, and what they share.

May import inference, nn, tasks.base, text and core.
"""
