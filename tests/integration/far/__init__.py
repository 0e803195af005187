"""Tests of far memory against a small real backend (``backend.py``)."""
