"""Other people's models, unchanged, with their layers wrapped in place."""
