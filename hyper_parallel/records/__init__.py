"""Records that several packages share: what was run and measured, written as JSON files and read back.

The planner writes them, the report renders them; both import this package, and it imports neither. No framework is known.
"""
