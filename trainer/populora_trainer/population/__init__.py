"""The population: LoRA members as values, the operators that breed them, their ratings, matches and lineage.

It must not import rollout, learning, storage, diagnostics, evaluation, the loop or the command line.
"""
