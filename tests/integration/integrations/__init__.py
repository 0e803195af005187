"""Other people's trainers on tiny random models: three steps with and without us."""
