"""Options and missing packages; no trainer runs here."""
