"""The image's handlers on tiny random models, called as a worker calls them."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from amphora.common import devices
from amphora.serving import settings
from amphora.serving.api import exchange
from amphora.serving.api.canonical import ModelTraits
from amphora.serving.protocol.media_types import Fault
from amphora.serving.worker import handlers
from amphora.serving.worker.context import Context
from amphora.serving.worker.runner import Item, ModelRunner
from tests.support.paths import CODE
from tests.support.tiny_models import SPECIAL as SPECIAL
from tests.support.tiny_models import WORDS as WORDS
from tests.support.tiny_models import save as save
from tests.support.tiny_models import tokenizer as tokenizer

sys.path.insert(0, str(CODE))

TEXTS = ["the film was good", "anna said paris was bad again .", "who", "in the film anna was good"]


def predict(model: Any, requests: Sequence[Any]) -> list[Any]:
    """Return the entries, or the stream, that a served task predicts for requests together."""

    def entries(prediction: Any) -> Any:
        if callable(prediction):
            return lambda: entries(prediction())
        return prediction["entries"] if isinstance(prediction, dict) else prediction

    return [*map(entries, model.predict([model.prepare(request) for request in requests]))]


def request(
    inputs: Any, path: str = "/invocations", *, generates: bool = False, **parameters: Any
) -> Any:
    """Return the request of a JSON body in Hugging Face's form, to a model that generates by
    OpenAI's keys, or to another one."""
    from recipe.backend.generation import options
    from recipe.backend.requests.payloads import Request

    body = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    traits = ModelTraits(settings=[*options.PARAMETERS] if generates else ())
    (read,) = exchange.read(path, body, "application/json", traits).requests
    return Request(**read.values)


def save_nllb(folder: Path) -> Any:
    """Save a tiny random model of three languages; return it."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<s>", "<pad>", "</s>", "<unk>", *WORDS]
    base = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    codes = ["eng_Latn", "fra_Latn", "deu_Latn"]
    named: Any = transformers.NllbTokenizerFast
    reader = named(tokenizer_object=base, additional_special_tokens=codes, src_lang="eng_Latn",
                   model_max_length=32)  # fmt: skip
    torch.manual_seed(5)
    config = transformers.M2M100Config(
        vocab_size=len(reader), d_model=16, encoder_layers=1, decoder_layers=1, max_length=20,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
        max_position_embeddings=32, pad_token_id=1, bos_token_id=0, eos_token_id=2, init_std=0.5,
        decoder_start_token_id=2,
    )  # fmt: skip
    made: Any = transformers.M2M100ForConditionalGeneration(config).eval()
    made.save_pretrained(folder)
    reader.save_pretrained(folder)
    return made


class Handlers:
    """The image's handlers on one model, called as a worker calls them."""

    def __init__(self, folder: Path, **environ: str) -> None:
        from recipe.inference import registry

        with mock.patch.dict(os.environ, {"AMPHORA_DTYPE": "float32", **environ}):
            self.model = registry.load(str(folder), os.environ)
        described = self.model.describe()
        self._settings = settings.read(folder, {}, devices.detect({}))
        self.runner = ModelRunner(
            handlers.resolve(folder / "none", None, CODE).functions, self.model, self._settings,
            described, ModelTraits.from_description(described),
        )  # fmt: skip

    def ask_all(
        self, bodies: Sequence[Any], accept: str = "application/json", path: str = "/invocations",
        headers: Mapping[str, str] = {},
    ) -> list[Any]:  # fmt: skip
        """Return the answers to requests that are predicted in one batch; JSON, and the events of a
        stream, are parsed. Raise what the recipe refuses a request by, else Fault."""
        items = []
        for body in bodies:
            body, kind = body if isinstance(body, tuple) else (body, "application/json")
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            context = Context("id", headers, self._settings, path)
            items.append(Item("id", data, kind, accept, context))
            with refusals_of_the_recipe():
                self.runner.read_input(items[-1])
        answers: list[Any] = []
        for item, prediction in zip(items, self.runner.predict_batch(items), strict=True):
            with refusals_of_the_recipe():
                body, _ = self.runner.finish(item, prediction)
            self.headers = item.reply_headers
            if not isinstance(body, bytes):
                events = b"".join(body).decode().split("\n\n")[:-1]
                texts = [event.removeprefix("data: ") for event in events]
                answers.append([json.loads(text) for text in texts if text != "[DONE]"])
            else:
                answers.append(json.loads(body) if "json" in accept else body)
        return answers

    def ask(self, body: Any, accept: str = "application/json") -> Any:
        """Return the answer to one request."""
        return self.ask_all([body], accept)[0]

    def post(self, path: str, body: Any) -> Any:
        """Return the answer to one request of an API's route."""
        return self.ask_all([body], path=path)[0]


@contextlib.contextmanager
def refusals_of_the_recipe() -> Iterator[None]:
    """Raise the recipe's exception, with the server's message, instead of the Fault of it; and a
    BadRequest for what the server refuses itself."""
    from recipe.backend.requests.payloads import BadRequest

    try:
        yield
    except Fault as fault:
        cause = fault.__cause__
        if isinstance(cause, BadRequest):
            raise type(cause)(str(fault), fault.param) from fault
        if fault.status == 400:
            raise BadRequest(str(fault), fault.param) from fault
        raise cause or fault from fault


def npy(array: Any) -> bytes:
    """Return the array as an NPY file."""
    out = io.BytesIO()
    np.save(out, np.asarray(array), allow_pickle=False)
    return out.getvalue()


def assert_close(answer: Any, expected: Any, tolerance: float = 1e-5, location: str = "") -> None:
    """Assert equal structure, names and texts, and numbers that differ by at most `tolerance`."""
    if isinstance(expected, Mapping):
        assert isinstance(answer, Mapping), f"{location}: {answer!r} is not like {expected!r}"
        assert list(answer) == list(expected), f"{location}: {list(answer)}, not {list(expected)}"
        for name in expected:
            assert_close(answer[name], expected[name], tolerance, f"{location}.{name}")
    elif isinstance(expected, (list, tuple)):
        assert isinstance(answer, list), f"{location}: {answer!r} is not like {expected!r}"
        assert len(answer) == len(expected), f"{location}: {len(answer)}, not {len(expected)}"
        for number, pair in enumerate(zip(answer, expected, strict=True)):
            assert_close(*pair, tolerance, f"{location}[{number}]")
    elif isinstance(expected, str) or expected is None:
        assert answer == expected, location
    else:
        assert isinstance(answer, (int, float)), f"{location}: {answer!r} is not like {expected!r}"
        assert abs(answer - float(expected)) <= tolerance, f"{location}: {answer}, not {expected}"
