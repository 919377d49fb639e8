"""A stand-in for vLLM's server: records each body in the file RECORDED, and answers with three
tokens; with an error if a body holds "refused", and with a broken stream if it holds "broken", broken "at
once" or after a token. Its engine is dead while the file RECORDED.dead exists.
If it holds "halves" too, the second half of the error waits for the file RECORDED.read."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

PIECES = ["one", " two", "</s>"]
REGISTRY = (
    '_TEXT_GENERATION_MODELS = {\n    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),\n}\n'
)


def install(site: Path) -> Path:
    """Make the package below a folder for PYTHONPATH, and return that folder."""
    command, registry = site / "vllm/entrypoints/cli", site / "vllm/model_executor/models"
    for folder in (command, registry):
        folder.mkdir(parents=True)
    (site / "vllm/__init__.py").touch()
    (registry / "registry.py").write_text(REGISTRY)
    (command / "main.py").write_text(Path(__file__).read_text())
    return site


def _choice(number: int, is_chat: bool, tokens: slice, streams: bool) -> dict[str, Any]:
    pieces = PIECES[tokens]
    text = "".join(pieces).removesuffix("</s>")
    ends = PIECES[-1] in pieces
    choice: dict[str, Any] = {
        "index": number, "finish_reason": "stop" if ends else None, "stop_reason": None,
        "token_ids": [*range(len(PIECES))][tokens],
    }  # fmt: skip
    if is_chat:
        content = [{"token": piece, "logprob": -0.5} for piece in pieces]
        choice["delta" if streams else "message"] = {"role": "assistant", "content": text}
        return {**choice, "logprobs": {"content": content}}
    logprobs = {"tokens": pieces, "token_logprobs": [-0.5] * len(pieces)}
    return {**choice, "text": text, "logprobs": logprobs}


def proved_answer(body: dict[str, Any], proof: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a probe as in the proof, or as its `falsified` says."""
    for probe in proof["probes"]:
        (row,), (stored,), false = probe["rows"], probe["values"], proof.get("falsified", {})
        if body.get("echo") and body["prompt"] == row["ids"] + row["tokens"]:
            scores = [number + false.get("scores", 0) for number in stored["numbers"]]
            return {"choices": [{"logprobs": {"token_logprobs": [None, *scores, -0.5]}}]}
        if probe["prompt"] in (body.get("prompt"), body.get("messages")):
            tokens = {"prompt_token_ids": false.get("ids", row["ids"]),
                      "token_ids": false.get("tokens", row["tokens"])}  # fmt: skip
            return {"choices": [tokens]}
    return {"choices": [{"text": "one"}]}


async def _generate(request: web.Request) -> web.StreamResponse:
    text = await request.text()
    body = json.loads(text)
    with Path(os.environ["RECORDED"]).open("a") as file:
        session = request.headers.get("x-amzn-sagemaker-session-id")
        more = {"session": session} if session else {}
        file.write(json.dumps({"route": request.path, **body, **more}) + "\n")
    if "refused" in text:
        message = "this model's maximum context length is 8 tokens, max_tokens is 64"
        error = {"message": message, "param": "prompt"}
        return web.json_response({"error": error}, status=400)
    if (folder := Path(sys.argv[sys.argv.index("serve") + 1]) / "proof.json").exists():
        return web.json_response(proved_answer(body, json.loads(folder.read_text())))
    is_chat = request.path.startswith("/v1/chat")
    prompts = body.get("prompt", ["chat"])
    count = body.get("n", 1) * (len(prompts) if isinstance(prompts, list) else 1)
    if not body.get("stream"):
        choices = [_choice(number, is_chat, slice(None), False) for number in range(count)]
        choices = [{**choice, "stop_reason": (body.get("stop") or [None])[0]} for choice in choices]
        # vLLM promises no order.
        return web.json_response({"choices": choices[::-1], "prompt_token_ids": [7, 8]})
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for index in range(len(PIECES)):
        if "broken" in text and index == (1 if "at once" not in text else 0):
            begun, rest = b'data: {"err', b'or": {"message": "the engine has failed"}}\n\n'
            if "halves" in text:
                await response.write(begun)
                while not Path(os.environ["RECORDED"] + ".read").exists():
                    await asyncio.sleep(0.01)
                begun = b""
            # In one piece, else: what comes in two may be read as two.
            await response.write(begun + rest)
            break
        choice = _choice(0, is_chat, slice(index, index + 1), True)
        document = {"choices": [choice], "prompt_token_ids": None if index else [7, 8]}
        await response.write(b"data: " + json.dumps(document).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def _models(_: web.Request) -> web.Response:
    name = sys.argv[sys.argv.index("--served-model-name") + 1]
    return web.json_response({"data": [{"id": name, "max_model_len": 128}]})


async def _openapi(_: web.Request) -> web.Response:
    keys = (
        "model prompt messages add_generation_prompt continue_final_message max_tokens"
        " max_completion_tokens min_tokens n temperature top_p top_k min_p seed stop stream echo"
        " logprobs logit_bias repetition_penalty frequency_penalty include_stop_str_in_output"
        " truncate_prompt_tokens truncation_side return_token_ids response_format"
        " structured_outputs"
    )
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Body"}}}
    item = {"post": {"requestBody": {"content": content}}}
    document = {
        "paths": {"/v1/completions": item, "/v1/chat/completions": item},
        "components": {"schemas": {"Body": {"properties": {key: {} for key in keys.split()}}}},
    }
    return web.json_response(document)


async def _empty(_: web.Request) -> web.Response:
    return web.json_response({})


async def _health(_: web.Request) -> web.Response:
    is_dead = Path(os.environ["RECORDED"] + ".dead").exists()
    return web.Response(status=503 if is_dead else 200)


def main() -> None:
    app = web.Application(client_max_size=2**26)
    app.add_routes([web.get("/health", _health), web.get("/metrics", _empty)])
    app.add_routes([web.get("/v1/models", _models), web.get("/openapi.json", _openapi)])
    for route in ("/v1/completions", "/v1/chat/completions"):
        app.add_routes([web.post(route, _generate)])
    for route in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        app.add_routes([web.post(route, _empty)])
    web.run_app(app, path=sys.argv[sys.argv.index("--uds") + 1], print=print)


if __name__ == "__main__":
    main()
