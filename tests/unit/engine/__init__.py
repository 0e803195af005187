"""Unit tests of the engine on a fake device; no framework is imported here."""
