"""Rules as a language: no framework, no device."""
