"""Rows from files that people have: `location` opens them, `layouts` says what their columns mean."""
