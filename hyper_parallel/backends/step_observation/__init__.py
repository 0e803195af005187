"""Observing a step as it runs: memory, work, copies and waits over time. The result is a record; ``report`` draws it.

No framework is imported here: what is needed of one is in ``framework.py``.
"""
