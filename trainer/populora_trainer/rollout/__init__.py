"""Sampling from the base model: the engine protocol, the engine in this process and the one that asks vLLM.

How a base model is loaded is here too. It must not import learning, diagnostics, evaluation, the loop or the command
line.
"""
