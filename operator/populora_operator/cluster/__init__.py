"""The API server as the controller sees it: a small protocol, its errors, and the implementation over `kubernetes.aio`.

It knows nothing of runs and must not import anything of the controller but `names`.
"""
