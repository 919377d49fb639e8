"""Scores of what models answer, beyond those of classes and numbers."""
