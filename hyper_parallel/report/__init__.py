"""Run records in, text, pages, figures and traces out. This package measures nothing and knows no framework."""
