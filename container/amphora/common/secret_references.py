"""Reads tokens from AWS Secrets Manager, by the role of the job or model.

`HF_TOKEN=arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME` keeps the token out of what
DescribeTrainingJob and DescribeModel show.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from amphora.common import logs
from amphora.common.aws import aws_client
from amphora.common.errors import ConfigError

NAMES = (
    "HF_TOKEN",
    "HF_API_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
)
"""Variables that may hold the ARN of a secret: none of their own values is an ARN."""
_BEGINNING = re.compile(r"\s*arn:aws[a-z-]*:secretsmanager:")
# As in the task definitions of ECS, the name of a key of JSON may follow.
_ARN = re.compile(
    r"arn:aws[a-z-]*:secretsmanager:(?P<region>[a-z0-9-]+):\d{12}:secret:(?P<name>[^:]+)"
    r"(?::(?P<key>[^:]+))?:{0,2}"
)
_FORM = "arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME, with :KEY if the secret is JSON"


def read_references(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the variables that hold the ARN of a secret. Logs mask them from now on.

    Raises:
        ConfigError: A secret cannot be read, or is not one text; with all such problems.
    """
    values, problems = {}, []
    for name in NAMES:
        if not _BEGINNING.match(reference := environ.get(name, "")):
            continue
        try:
            values[name] = _read(name, reference.strip())
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(" ".join(problems))
    logs.remember(values.values())
    return values


def _read(variable: str, reference: str) -> str:
    if (arn := _ARN.fullmatch(reference)) is None:
        raise ConfigError(f"{variable} is not the ARN of a secret.", f"Give {_FORM}.")
    secret = f"{variable}: the secret {arn['name']} in {arn['region']}"
    name = reference.removesuffix("::").removesuffix(f":{arn['key']}")
    remedy = (
        "The role needs secretsmanager:GetSecretValue on it (and kms:Decrypt if a key of yours"
        " encrypts it), and a VPC without internet the endpoint secretsmanager."
    )
    problem = f"{secret} cannot be read"
    with aws_client(
        "secretsmanager", ConfigError, problem, remedy, region_name=arn["region"]
    ) as client:
        text: str = client.get_secret_value(SecretId=name).get("SecretString", "").strip()
    fields = _fields(text)
    if arn["key"] is not None:
        text = str((fields or {}).get(arn["key"], ""))
    elif fields is not None:
        raise ConfigError(
            f"{secret} is JSON with the keys {', '.join(fields)}.", "Append :KEY to the ARN."
        )
    if not text:
        missing = f"no key {arn['key']}" if arn["key"] is not None else "no text"
        raise ConfigError(f"{secret} has {missing}.", f"Give {_FORM}.")
    return text


def _fields(text: str) -> dict[str, Any] | None:
    """Return the object that the text of a secret is, None for another text."""
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None
