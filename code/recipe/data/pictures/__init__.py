"""Pictures with their classes: found, labelled, decoded."""
