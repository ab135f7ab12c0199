"""Corpora: where texts come from, how they are tokenised once and stored, and the order of examples.

May import text and core.
"""
