"""Calls services of AWS, with the credentials that boto3 finds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amphora.common.errors import AmphoraError


@contextmanager
def aws_client(
    service: str, kind: type[AmphoraError], problem: str, remedy: str, **options: Any
) -> Iterator[Any]:
    """Yield boto3's client of a service.

    Args:
        kind: Raised for errors of AWS within the block, whose text follows `problem`.
        options: Of `boto3.client`, such as `region_name`.
    """
    # Importing boto3 takes a quarter of a second.
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    retries = {"mode": "standard", "total_max_attempts": 3}
    config = Config(connect_timeout=5, read_timeout=15, retries=retries)
    try:
        yield boto3.client(service, config=config, **options)
    except (BotoCoreError, ClientError) as error:
        raise kind(f"{problem}: {error}.", remedy) from error
