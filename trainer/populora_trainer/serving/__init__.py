"""The sidecar of a vLLM server: it keeps the adapters that vLLM serves equal to what the run's trainer has published.

Reads the run's storage and speaks HTTP; must not import the loop, the learner, or torch, which its image lacks.
"""
