"""From rewards to weights: advantages, the objective and the mixed update of all adapters at once.

It must not import storage, diagnostics, evaluation, the loop or the command line.
"""
