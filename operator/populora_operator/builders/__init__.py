"""The children of a run as pure functions from the run to manifests in plain dictionaries.

They see no cluster and no clock, and must not import `kopf`, `kubernetes` or anything that has effects.
"""
