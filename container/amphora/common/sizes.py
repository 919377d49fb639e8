"""Format numbers of bytes."""


def format_bytes(size: float) -> str:
    """Return a number of bytes with its unit: '494 kB'."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
