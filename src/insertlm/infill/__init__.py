"""A text with blanks becomes a request, the request a draft that grows, the draft a filled text.

May import families, inference, text and core.
"""
