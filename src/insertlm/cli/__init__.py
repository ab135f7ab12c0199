"""The command line: what each command takes, does and prints.

`insertlm NAME` is in NAME.py, its arguments are in arguments.py, and main.py puts them together.
May import everything below: training, evaluation, release, plots, server, model.
"""
