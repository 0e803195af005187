"""The contract suite: every Platform member, on every platform named with ``--platform``."""
