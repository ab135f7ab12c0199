"""The command line: what each command takes, does and prints.

May import everything below: training, evaluation, release, plots, server, model.
"""
