"""Files of a folder or of the Hugging Face hub, and whether the hub can be reached."""

from __future__ import annotations

import functools
import socket
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants
from transformers.utils.hub import cached_file

_ABSENCES = ("gated_repo", "missing_entries", "connection_errors")
_ARGUMENTS = ("token", "revision", "subfolder", "cache_dir", "local_files_only")
_ATTEMPTS, _SECONDS = 3, 3.0


def find_file(location: str, name: str, options: Mapping[str, Any]) -> Path | None:
    """Return a file of a folder, or one downloaded from the hub; None if it is not available.

    Args:
        options: Arguments for `from_pretrained`.
    """
    if Path(location).is_dir():
        path = Path(location) / options.get("subfolder", "") / name
        return path if path.is_file() else None
    why_unreachable()
    silent = {f"_raise_exceptions_for_{absence}": False for absence in _ABSENCES}
    taken = {key: options[key] for key in _ARGUMENTS if key in options}
    try:
        cached = cached_file(location, name, **silent, **taken)
    except OSError:
        return None
    return Path(cached) if cached else None


def why_unreachable() -> str:
    """Return why this host cannot reach the hub; empty if it can, has a proxy, or works offline.

    Without a connection, the libraries would repeat each request for 23 seconds: they take files
    from their cache alone then.
    """
    return "" if urllib.request.getproxies() else _connect(constants.ENDPOINT)


@functools.cache
def _connect(endpoint: str) -> str:
    """Connect to the hub, and return the error; without a connection, set the libraries offline."""
    if constants.HF_HUB_OFFLINE:
        return ""
    url, reason = urlsplit(endpoint), ""
    port = url.port or (80 if url.scheme == "http" else 443)
    for attempt in range(_ATTEMPTS):
        time.sleep(attempt)
        try:
            answers = socket.getaddrinfo(url.hostname, port, type=socket.SOCK_STREAM)
            # One address of each family: a firewall may leave each without an answer.
            hosts = sorted({family: str(address[0]) for family, *_, address in answers}.items())
            socket.create_connection((hosts[attempt % len(hosts)][1], port), _SECONDS).close()
            return ""
        except OSError as error:
            reason = f"{url.hostname} cannot be reached ({error})"
    constants.HF_HUB_OFFLINE = True
    return reason
