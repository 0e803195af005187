"""What happens to saved values, and how two threads overlap. No framework is imported here."""
