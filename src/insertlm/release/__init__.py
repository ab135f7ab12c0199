"""What users publish: exported folders with model card and code, and folders of rounded weights.

May import model and all below it.
"""
