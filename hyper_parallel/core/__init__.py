"""The engine rooms: what happens to saved values, and how two threads overlap. No framework is imported here."""
