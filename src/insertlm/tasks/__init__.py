"""Tasks say what is given, what must be written and how it is scored: star graphs, zebra puzzles, text; infilling sets.

May import data, text and core.
"""
