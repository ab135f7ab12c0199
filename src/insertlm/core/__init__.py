"""What everything stands on: errors, files, hashes and noise, packed rows, sections of recipes, processes.

Imports nothing of the package.
"""
