"""The three problem types: prompts, parsing, rewards and the buffer of problems seen.

Pure values and text; must not import torch, the population or the learner.
"""
