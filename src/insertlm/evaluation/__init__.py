"""How good a model is: exact match, likelihood, texts judged by other models, lm-evaluation-harness.

May import model and all below it; never training.
"""
