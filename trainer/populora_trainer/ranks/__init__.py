"""The processes that train one run together: who each is, how they start, talk, and notice that one is lost.

It knows neither models nor runs, and imports nothing of the engine but its errors.
"""
