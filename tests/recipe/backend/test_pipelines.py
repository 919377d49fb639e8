"""Tasks that pipelines of transformers answer, on tiny random models: the bodies and answers of
sagemaker_huggingface_inference_toolkit; and what is refused instead of opened."""

import base64
import io
import json
import pickle
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from amphora.serving.protocol.media_types import Fault
from recipe.backend import bounds
from recipe.backend.pipelines.inputs import TASKS, InputReader
from recipe.backend.requests.payloads import BadRequest
from recipe.backend.requests.probes import TEXTS
from recipe.errors import ModelError
from tests.support import pipeline_models as models
from tests.support.images import PICTURE, TEXT, made, save_llava
from tests.support.pipeline_models import SPOKEN, WAV, sound
from tests.support.servers import Running
from tests.support.serving_kit import Handlers, assert_close
from tests.support.toolkit import import_toolkit

PNG = base64.b64decode(TEXT)
SPEECH = base64.b64encode(WAV).decode()
SAMPLES = np.frombuffer(WAV[44:], "<i2").astype(np.float32) / 32768
TABLE = {"name": ["ab", "cd"], "age": ["12", "34"]}
WORDS = [["film", [0, 0, 90, 20]], ["paris", [100, 0, 190, 20]], ["good", [200, 0, 290, 20]]]
QUESTION = {"question": "who", "word_boxes": WORDS}
PROMPT = "<image> the film"
CHAT = [
    {"role": "user", "content": [{"type": "image", "image": TEXT}, {"type": "text", "text": "a"}]}
]
needs_audio = pytest.mark.skipif("not __import__('importlib').util.find_spec('soundfile')", reason="soundfile")  # fmt: skip


@pytest.fixture
def encode(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """The toolkit's encoder of answers."""
    encode_json: Callable[[Any], str] = import_toolkit(monkeypatch, "decoder_encoder").encode_json
    return encode_json


def seeded(pipeline: Any, *inputs: Any, **parameters: Any) -> Any:
    torch.manual_seed(3)
    return pipeline(*inputs, **parameters)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("save", "task", "requested"), [
    pytest.param(models.save_audio_classifier, "audio-classification", [
        ((WAV, "audio/wav"), lambda p: p(SAMPLES)),
        ({"inputs": [SPEECH, SPEECH], "top_k": 2}, lambda p: p([SAMPLES, SAMPLES], top_k=2)),
    ], marks=[needs_audio, pytest.mark.heavy]),
    (models.save_tapas, "table-question-answering", [
        ({"inputs": {"query": "age of ab", "table": TABLE}}, lambda p: p({"query": "age of ab", "table": TABLE})),
        ({"query": "x", "table": TABLE}, lambda p: p({"query": "x", "table": TABLE})),
        ({"inputs": {"query": ["x", "y"], "table": TABLE}, "sequential": True},
         lambda p: p({"query": ["x", "y"], "table": TABLE}, sequential=True)),
    ]),
    *(pytest.param(*values, marks=[pytest.mark.heavy, *([needs_audio] if "audio" in values[1] or "speech" in values[1] else [])]) for values in [
        (models.save_ctc, "automatic-speech-recognition", [
            ((WAV, "audio/x-audio"), lambda p: p(SAMPLES)),
            ({"inputs": SPEECH, "parameters": {"return_timestamps": "char"}}, lambda p: p(SAMPLES, return_timestamps="char")),
            ({"inputs": SPEECH, "chunk_length_s": 2, "stride_length_s": 0.2},
             lambda p: p(SAMPLES, chunk_length_s=2, stride_length_s=0.2)),
        ]),
        (models.save_speech_to_text, "automatic-speech-recognition", [
            ({"inputs": SPEECH, "parameters": {"generate_kwargs": {"max_new_tokens": 5, "num_beams": 2}}},
             lambda p: p(SAMPLES, generate_kwargs={"max_new_tokens": 5, "num_beams": 2})),
            ({"inputs": SPEECH, "max_new_tokens": 5, "do_sample": True, "seed": 3},
             lambda p: seeded(p, SAMPLES, max_new_tokens=5, do_sample=True)),
        ]),
        (models.save_clap, "zero-shot-audio-classification", [
            ({"inputs": SPEECH, "candidate_labels": ["film", "paris"], "hypothesis_template": "the {}"},
             lambda p: p(SAMPLES, candidate_labels=["film", "paris"], hypothesis_template="the {}")),
        ]),
        (models.save_vits, "text-to-audio", [({"inputs": "a film", "seed": 3}, lambda p: seeded(p, "a film"))]),
        (models.save_layoutlm, "document-question-answering", [
            ({"inputs": {"image": TEXT, **QUESTION}}, lambda p: p({"image": PICTURE, **QUESTION})),
            ({"inputs": {"question": "who", "word_boxes": WORDS * 30}, "max_seq_len": 20, "doc_stride": 4, "top_k": 2},
             lambda p: p({"question": "who", "word_boxes": WORDS * 30}, max_seq_len=20, doc_stride=4, top_k=2)),
        ]),
        (save_llava, "image-text-to-text", [
            ({"inputs": {"image": TEXT, "text": PROMPT}, "max_new_tokens": 5, "return_full_text": False},
             lambda p: p({"images": PICTURE, "text": PROMPT}, max_new_tokens=5, return_full_text=False)),
            ({"inputs": CHAT, "parameters": {"max_new_tokens": 5}}, lambda p: p(CHAT, max_new_tokens=5)),
        ]),
        (models.save_depth, "depth-estimation", [((PNG, "image/png"), lambda p: p(PICTURE))]),
        (models.save_owl, "zero-shot-object-detection", [
            ({"inputs": TEXT, "candidate_labels": ["film"], "top_k": 3, "threshold": 0.0},
             lambda p: p(PICTURE, candidate_labels=["film"], top_k=3, threshold=0.0)),
        ]),
        (models.save_matcher, "keypoint-matching", [
            ({"inputs": [TEXT, TEXT]}, lambda p: p([PICTURE, PICTURE])),
            ({"inputs": [[TEXT, TEXT]], "threshold": 0.1}, lambda p: [p([PICTURE, PICTURE], threshold=0.1)]),
        ]),
    ]),
])  # fmt: skip
def test_a_task_answers_as_its_pipeline_in_the_toolkit(
    save: Callable[[Path], None], task: str, requested: list[Any],
    encode: Callable[[Any], str], tmp_path: Path,
) -> None:  # fmt: skip
    torch.manual_seed(5)
    save(tmp_path)
    served = Handlers(tmp_path, HF_TASK=task)
    example = served.model.example(TEXTS[0])
    assert example is not None
    (prediction,) = served.model.predict([served.model.prepare(example)])
    assert not isinstance(prediction, Exception), prediction
    pipeline = made.pipeline(task, model=str(tmp_path), device="cpu")
    for body, call in requested:
        wanted = json.loads(encode(call(pipeline)))
        assert_close(served.ask(body), wanted, 1e-5, str(body)[-90:])
    if "table" in task:
        assert "X-Amphora-Truncated" not in served.headers
        long = {"query": "x", "table": {"name": ["ab"] * 40}}
        served.ask({"inputs": [{"query": "x", "table": TABLE}, long]})
        assert served.headers["X-Amphora-Truncated"] == "1"
        # It would take minutes in which nothing else is answered, or have no embeddings.
        for table, words in [
            ({"a": ["1"] * 40}, "40 rows .* 31 are"), ({str(n): ["1"] for n in range(40)}, "40 columns .* 31 are"),
            ({"a": ["1"] * 600}, "600 cells .* 512 are"),
        ]:  # fmt: skip
            with pytest.raises(BadRequest, match=words):
                served.ask({"query": "x", "table": table})
        with pytest.raises(BadRequest, match="An input is a file, not an object of query, table"):
            served.ask((PNG, "image/png"))


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
def test_what_transformers_5_dropped_is_answered_as_by_version_4(tmp_path: Path) -> None:
    torch.manual_seed(5)
    for name in ("vilt", "blip", "captioner", "upscaler"):
        (tmp_path / name).mkdir()
        getattr(models, f"save_{name}")(tmp_path / name)
    question = {"image": TEXT, "question": "who"}
    served = Handlers(tmp_path / "vilt")
    (first, second) = served.ask({"inputs": question, "parameters": {"top_k": 2}})
    assert first["answer"].startswith("LABEL_")
    assert first["score"] >= second["score"]
    assert served.ask({**question, "top_k": 1}) == [
        {**first, "score": pytest.approx(first["score"], abs=1e-5)}
    ]
    served = Handlers(tmp_path / "blip", HF_TASK="vqa")
    (answer,) = served.ask({"inputs": [question]})
    assert [*answer[0]] == ["answer"]
    served = Handlers(tmp_path / "captioner", HF_TASK="image-to-text")
    model = served.model.pipeline.model  # type: ignore[attr-defined]
    pixels = served.model.pipeline.image_processor(PICTURE, return_tensors="pt").pixel_values  # type: ignore[attr-defined]
    ids = model.generate(pixels, max_new_tokens=6, num_beams=2)[0]
    wanted = served.model.tokenizer or served.model.pipeline.tokenizer  # type: ignore[attr-defined]
    text = wanted.decode(ids, skip_special_tokens=True)
    body = {
        "inputs": TEXT,
        "parameters": {"generate_kwargs": {"max_new_tokens": 6, "num_beams": 2}},
    }
    assert served.ask(body) == [{"generated_text": text}]
    served = Handlers(tmp_path / "upscaler")
    png = served.ask((PNG, "image/png"), accept="image/png")
    from PIL import Image

    # In multiples of 4, twice as large.
    assert Image.open(io.BytesIO(png)).size == (104, 88)
    assert base64.b64decode(served.ask({"inputs": TEXT})) == png


@needs_audio
@pytest.mark.filterwarnings("ignore")
def test_audio_of_any_rate_and_channels_is_read_and_nothing_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import soundfile

    torch.manual_seed(5)
    (tmp_path / "model").mkdir()
    models.save_audio_classifier(tmp_path / "model")
    served = Handlers(tmp_path / "model")
    reader: Any = served.model.prepare
    from recipe.backend.requests.payloads import Request

    def samples(data: bytes) -> Any:
        (value,) = reader(Request(inputs=[data])).values
        return value

    tone = np.sin(np.arange(24_000) / 12).astype(np.float32) / 2  # 48,000 Hz
    assert (
        np.abs(
            samples(sound(tone, 48_000, channels=2))[400:-400]
            - np.sin(np.arange(8_000) / 4)[400:-400] / 2
        ).max()
        < 1e-3
    )
    flac = io.BytesIO()
    soundfile.write(
        flac, np.stack([tone, np.zeros_like(tone)], axis=1), 48_000, format="FLAC", subtype="PCM_24"
    )
    assert_close(
        samples(flac.getvalue()).tolist(), (samples(sound(tone, 48_000)) / 2).tolist(), 1e-4
    )
    assert np.array_equal(samples(WAV), SAMPLES)
    secret = tmp_path / "secret.wav"
    secret.write_bytes(WAV)
    monkeypatch.chdir(tmp_path)
    loud = io.BytesIO()
    soundfile.write(loud, np.full(8_000, 3e38), 16_000, format="WAV", subtype="FLOAT")
    with pytest.raises(BadRequest, match="text is empty"):
        InputReader(TASKS["text-to-audio"], 16_000).read(" ")
    for body, words in [
        ({"inputs": str(secret)}, "not followed"), ({"inputs": "secret.wav"}, "not a valid audio file"),
        ({"inputs": "http://169.254.169.254/a.wav"}, "not followed"), ({"inputs": {"raw": [0.1]}}, "not an audio file"),
        ((pickle.dumps(SPOKEN), "audio/wav"), "Send WAV, FLAC"), ((b"", "audio/wav"), "empty"), ({"inputs": TEXT}, "cannot be read"),
        ((sound(SPOKEN[:0]), "audio/wav"), "no samples"), ((sound(SPOKEN[:9]), "audio/wav"), "cannot be answered"),
        ((loud.getvalue(), "audio/wav"), "NaN, or not from"), ((sound(rate=400), "audio/wav"), "400 samples a second"), ({"inputs": SPEECH, "num_workers": 2}, "num_workers"),
    ]:  # fmt: skip
        with pytest.raises(BadRequest, match=words):
            served.ask(body)
    with pytest.raises(Fault, match="application/x-npy"):
        served.ask((pickle.dumps(SPOKEN), "application/x-npy"))
    # A record that the model cannot read is refused in its place.
    short = base64.b64encode(sound(SPOKEN[:9])).decode()
    lines = "\n".join(json.dumps({"inputs": value}) for value in (SPEECH, short, SPEECH))
    first, second, third = served.ask((lines.encode(), "application/jsonlines"))
    assert "cannot be answered" in second["error"]["message"]
    assert first == third
    assert served.headers["X-Amphora-Failed"] == "1"
    bounds.read({"AMPHORA_MAX_AUDIO_SECONDS": "1"})
    try:
        with pytest.raises(bounds.TooCostly, match="AMPHORA_MAX_AUDIO_SECONDS"):
            served.ask({"inputs": [SPEECH] * 3})
    finally:
        bounds.read({})


@pytest.mark.filterwarnings("ignore")
def test_parts_of_an_input_are_checked_before_a_pipeline_gets_them(tmp_path: Path) -> None:
    torch.manual_seed(5)
    save_llava(tmp_path / "llava")
    served = Handlers(tmp_path / "llava")
    url = "http://169.254.169.254/a.png"

    def chat(part: Any) -> Any:
        return {"inputs": [{"role": "user", "content": [part]}]}

    for body, words in [
        ({"inputs": {"image": url, "text": PROMPT}}, "not followed"),
        ({"inputs": {"image": TEXT, "text": PROMPT, "table": {}}}, 'Send for example .*"text"'),
        ({"inputs": {"image": TEXT}}, "not an object of"), ({"inputs": TEXT * 4}, "tokens"),
        (chat({"type": "image", "url": url}), "not followed"), (chat({"type": "image", "path": "/etc/passwd"}), "not followed"),
        (chat({"type": "image", "image": TEXT, "url": url}), "A part of a message"), (chat({"type": "video", "url": url}), "A part of a message"),
        (chat({"type": "text", "text": 3}), "A text is expected"), ({"inputs": "a", "max_new_tokens": 999}, "the limit is 128"),
        ({"inputs": "a", "generate_kwargs": {"custom_generate": "a/b"}}, "custom_generate"),
        ({"inputs": "a", "chat_template": "{{ 1 }}"}, "chat_template"), ({"inputs": "a", "num_beams": 999}, "the limit is 64"),
        ({"inputs": {"image": TEXT, "text": "a"}, "max_new_tokens": 2}, "cannot be answered"),
    ]:  # fmt: skip
        with pytest.raises(BadRequest, match=words):
            served.ask(body)
    # The client's own form of an image is repeated.
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{TEXT}"}}
    (answer,) = served.ask({**chat(part), "parameters": {"max_new_tokens": 2}})
    assert answer["input_text"][0]["content"] == [
        {"type": "image", "image": part["image_url"]["url"]}
    ]


@needs_audio
@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
def test_a_server_reads_audio_writes_wav_and_refuses_a_model_without_its_head(
    tmp_path: Path,
) -> None:
    torch.manual_seed(5)
    for name, save in (("ears", models.save_ctc), ("voice", models.save_vits)):
        (tmp_path / name / "model").mkdir(parents=True)
        save(tmp_path / name / "model")
    with Running(tmp_path / "ears", {"SAGEMAKER_MODEL_SERVER_WORKERS": "2"}) as running:
        running.ready()
        headers = {"content-type": "audio/wav"}
        answers = [
            running.http.post("/invocations", content=WAV, headers=headers) for _ in range(4)
        ]
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.json()["text"] for answer in answers}) == 1
        refused = running.http.post("/invocations", content=b"RIFF", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_request")
        assert (
            running.http.post(
                "/invocations", content=WAV, headers={"content-type": "text/csv"}
            ).status_code
            == 400
        )
    with Running(tmp_path / "voice", {"HF_TASK": "text-to-speech"}) as running:
        running.ready()

        def ask(accept: str) -> httpx.Response:
            body = {"inputs": "a film", "parameters": {"seed": 1}}
            return running.http.post("/invocations", json=body, headers={"accept": accept})

        answer = ask("application/json").json()
        with wave.open(io.BytesIO(ask("audio/wav").content)) as file:
            assert (file.getframerate(), file.getnchannels()) == (16_000, 1)
            heard = np.frombuffer(file.readframes(99_999), "<i2") / 32767
        assert_close(heard.tolist(), answer["audio"], 1e-4)
        assert ask("image/png").status_code == 406
    made.Wav2Vec2Model.from_pretrained(tmp_path / "ears/model").save_pretrained(
        tmp_path / "headless"
    )
    models.save_features(tmp_path / "headless")
    with pytest.raises(ModelError, match=r"lacks all weights of (classifier|projector)"):
        Handlers(tmp_path / "headless", HF_TASK="audio-classification")


def test_a_model_that_would_have_code_trusted_is_refused(tmp_path: Path) -> None:
    """A LightGlue passes it on to the model that its config.json names, before transformers 5.5."""
    models.save_matcher(tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "trust_remote_code": True}))
    with pytest.raises(
        ModelError, match=r"has trust_remote_code, .* set HF_TRUST_REMOTE_CODE=true"
    ):
        Handlers(tmp_path, HF_TASK="keypoint-matching")
