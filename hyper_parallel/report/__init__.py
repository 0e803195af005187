"""The print shop: records in, text, pages and traces out. It computes nothing and knows no framework."""
