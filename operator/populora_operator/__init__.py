"""The controller: makes the children of every PopulationRun in a cluster what its spec says, and its status true.

It imports `populora_api` and never the engine, which it knows only as container images with an HTTP status.
"""
