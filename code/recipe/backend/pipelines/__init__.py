"""Tasks that pipelines of transformers answer, and pipelines around loaded models."""
