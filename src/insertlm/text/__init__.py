"""Text to ids and back: tokenizers, sentences, detokenisers, and the syntax of blanks.

May import core.
"""
