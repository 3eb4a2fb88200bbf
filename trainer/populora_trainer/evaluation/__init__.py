"""How good members are on problems whose programs no training saw.

Uses the same engine, prompts and verifier as training; must not import the loop, storage or a command.
"""
