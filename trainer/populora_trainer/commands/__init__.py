"""One module per command of `populora`, each with a click command named `command`.

A command parses, delegates and prints; it imports heavy libraries inside its function, so that `populora --help` is
instant, and nothing may import it but the command line.
"""
