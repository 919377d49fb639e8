"""/openapi.json says what the server has, and no more."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from starlette.applications import Starlette
from starlette.routing import Route

from amphora.common.devices import Devices
from amphora.serving import settings as hosting
from amphora.serving.http import openapi
from amphora.serving.http.invocations import error_body
from amphora.serving.http.server import Front


@pytest.mark.parametrize("multi_model", ["false", "true"])
@pytest.mark.parametrize("page", ["0", "1"])
def test_every_route_is_described(tmp_path: Path, multi_model: str, page: str) -> None:
    environ = {"SAGEMAKER_MULTI_MODEL": multi_model, "AMPHORA_UI": page}
    settings = hosting.read(tmp_path, environ, Devices(cpus=2, efa=False, reason="test"))

    async def routes() -> list[Route]:
        app = Front(settings, environ).application()
        starlette = app._app  # type: ignore[attr-defined]
        assert isinstance(starlette, Starlette)
        return [route for route in starlette.routes if isinstance(route, Route)]

    there = {
        (route.path.replace(":path", ""), method)
        for route in asyncio.run(routes())
        for method in route.methods or ()
        # With a slash at its end a route is the same.
        if route.path == "/" or not route.path.endswith("/")
    }
    described = {
        (path, method.upper())
        for path, item in openapi.describe(settings)["paths"].items()
        for method in item
        if method != "parameters"
    }
    assert {each for each in there if each[1] != "HEAD"} == described


def test_an_error_has_the_form_that_is_described_for_its_route(tmp_path: Path) -> None:
    settings = hosting.read(tmp_path, {}, Devices(cpus=2, efa=False, reason="test"))
    document = openapi.describe(settings)
    seen = set()
    for path in ("/invocations", "/v1/chat/completions", "/embed", "/rerank", "/generate"):
        (content,) = document["paths"][path]["post"]["responses"]["400"]["content"].values()
        name = content["schema"]["$ref"].rpartition("/")[2]
        schema = document["components"]["schemas"][name]
        error = json.loads(error_body("bad_request", "no", "1", 400, path))
        Draft202012Validator(schema).validate(error)
        seen.add(name)
    assert seen == {"Error", "OpenAIError", "TEIError", "TGIError"}
