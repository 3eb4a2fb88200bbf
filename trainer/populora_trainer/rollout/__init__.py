"""Sampling from the base model: the engine protocol, the in-process engine, and how a base model is loaded.

It must not import learning, storage, diagnostics, evaluation, the loop or the command line.
"""
