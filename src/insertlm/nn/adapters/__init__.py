"""Pretrained checkpoints of other libraries, read as a description of a transformer and weights by our names.

One module for each kind of model. May import what nn may, and the rest of nn.
"""
