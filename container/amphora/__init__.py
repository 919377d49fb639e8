"""Amphora: how a container image speaks Amazon SageMaker."""

__version__ = "0.1.0"
