"""Read prices by the hour, from a file or from AWS's price API."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from amphora.common.aws import aws_client
from amphora.common.errors import ConfigError

AWS = "aws"
_REMEDY = 'Write lines ml.g5.xlarge,1.41 into a .csv, or {"ml.g5.xlarge": 1.41} into a .json.'


def read_prices(path: Path) -> dict[str, float]:
    """Return the price of an hour by instance type, of a .csv or .json file. Raise ConfigError with
    all of its wrong entries."""
    try:
        text = path.read_text(encoding="utf-8")
        rows: Iterable[tuple[str, Any]]
        if path.suffix == ".json":
            content = json.loads(text)
            rows = content.items() if isinstance(content, dict) else [(text[:40], None)]
        else:
            lines = [row for row in csv.reader(text.splitlines()) if row]
            if lines and not lines[0][0].startswith("ml."):
                del lines[0]  # the header
            rows = [(row[0].strip(), row[1] if len(row) == 2 else None) for row in lines]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prices {path} cannot be read: {error}.", _REMEDY) from error
    prices: dict[str, float] = {}
    wrong = []
    for name, value in rows:
        price = _positive(value)
        if price is None or not name.startswith("ml."):
            wrong.append(f"{name}: {value!r}")
        else:
            prices[name] = price
    if wrong or not prices:
        shown = "; ".join(wrong) or "it is empty"
        raise ConfigError(f"--prices {path} has entries without a price: {shown}.", _REMEDY)
    return prices


def _positive(value: Any) -> float | None:
    try:
        price = float(value)
    except (TypeError, ValueError):
        return None
    return price if 0 < price < float("inf") else None


def fetch_prices(use: str, region: str) -> dict[str, float]:
    """Return the on-demand prices of a region in US dollars, from AWS's price API.

    Args:
        use: `Training` or `Hosting`.

    Raises:
        ConfigError: The API does not answer, or knows no price.
    """
    filters = {"regionCode": region, "productFamily": "ML Instance", "platoinstancetype": use}
    remedy = "Set AWS_REGION, and credentials with pricing:GetProducts, or give --prices FILE."
    problem = "AWS's price API does not answer"
    with aws_client("pricing", ConfigError, problem, remedy, region_name="us-east-1") as client:
        pages = client.get_paginator("get_products").paginate(
            ServiceCode="AmazonSageMaker",
            Filters=[
                {"Type": "TERM_MATCH", "Field": field, "Value": value}
                for field, value in filters.items()
            ],
        )
        prices = dict(_hourly(json.loads(item) for page in pages for item in page["PriceList"]))
    if not prices:
        raise ConfigError(f"AWS's price API has no prices for region {region!r}.", remedy)
    return prices


def _hourly(products: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the types of products, and their prices in US dollars."""
    for product in products:
        name = product["product"]["attributes"].get("instanceName", "")
        for term in product["terms"].get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                price = _positive(dimension["pricePerUnit"].get("USD"))
                if price is not None and name.startswith("ml."):
                    yield name, price
