"""`PopulationRun` v1alpha1: the one definition of the manifest, as pydantic models.

Imports neither torch nor kopf, so that every part can read a manifest cheaply.
"""
