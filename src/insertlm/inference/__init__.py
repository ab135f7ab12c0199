"""Writing, in ids only: prompts, settings, canvases, rules, sampling, the engine, sessions, trajectories.

May import nn and core. It meets families only through the Writer and Author protocols of engine.py.
"""
