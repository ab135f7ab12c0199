"""The probability that a model writes a text: exactly, or as a lower bound with a standard error.

    measure     the question, and the answer for every family
    states      a bound from states in which tokens are missing, all of them or a random choice
    insertions  an ILM's ways to a text: the exact sum over all of them, and the bound
    masks       an MDM's bound

May import the families and what families may import.
"""
