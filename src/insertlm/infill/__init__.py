"""Infilling from text to text: a request, the drafts that grow from it, and the filled texts.

May import families, inference, text and core.
"""
