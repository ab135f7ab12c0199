"""How good a model is: exact match, likelihood, texts scored by other models, lm-evaluation-harness.

A result comes with its provenance, and long evaluations keep a journal, so that a stopped one goes on where it was.

May import model and all below it; never training.
"""
