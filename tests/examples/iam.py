"""Policies of IAM: which of AWS's actions they allow, for what examples/aws holds."""

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

POLICIES = Path(__file__).parents[2] / "examples" / "aws"
TESTS = {
    "StringEquals": lambda expected, value: value == expected,
    "ForAnyValue:StringEquals": lambda expected, value: expected in (value or ()),
    "Bool": lambda expected, value: str(value).lower() == expected,
}


def read_policy(name: str) -> list[dict[str, Any]]:
    """Return the statements of a file in examples/aws."""
    policy = json.loads((POLICIES / name).read_text())
    assert policy["Version"] == "2012-10-17"
    statements: list[dict[str, Any]] = policy["Statement"]
    return statements


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def is_allowed(
    statements: list[dict[str, Any]],
    action: str,
    resource: str = "*",
    context: Mapping[str, Any] | None = None,
) -> bool:
    """Return whether a statement allows the action, as IAM decides without any Deny.

    Raises:
        KeyError: A condition has an operator that is not known here.
    """

    def applies(statement: dict[str, Any]) -> bool:
        assert statement["Effect"] == "Allow"
        actions, resources = as_list(statement["Action"]), as_list(statement["Resource"])
        return (
            any(fnmatchcase(action.lower(), pattern.lower()) for pattern in actions)
            and any(fnmatchcase(resource, pattern) for pattern in resources)
            and all(
                TESTS[operator](expected, (context or {}).get(key))
                for operator, keys in statement.get("Condition", {}).items()
                for key, expected in keys.items()
            )
        )

    return any(map(applies, statements))
