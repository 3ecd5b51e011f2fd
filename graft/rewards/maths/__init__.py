"""Grading of mathematical answers; read `grading.py` first."""
