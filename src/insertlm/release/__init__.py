"""What leaves the house: exported folders with their card and code, and rounded weights.

May import model and all below it.
"""
