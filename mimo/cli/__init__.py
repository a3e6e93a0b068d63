"""The `mimo` command: run the whole system, talk to it, show it."""
