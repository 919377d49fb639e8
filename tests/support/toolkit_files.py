"""Inference files as users write them for the images of AWS and Hugging Face, and requests.

Modelled on what those toolkits document and test: every subset of the functions, models of every
kind, each of the types that the defaults read and write. None is copied.
"""

from __future__ import annotations

from tests.support.toolkit_files_hub import HUGGING_FACE
from tests.support.toolkit_files_torch import PYTORCH
from tests.support.toolkit_questions import (
    CSV,
    NPY,
    ROWS,
    File,
    ask,
    ask_bytes,
    ask_csv,
    ask_npy,
)

SERVICE = """
from sagemaker_inference import content_types, decoder, encoder
from sagemaker_inference.default_handler_service import DefaultHandlerService
from sagemaker_inference.default_inference_handler import DefaultInferenceHandler
from sagemaker_inference.transformer import Transformer

class Mine(DefaultInferenceHandler):
    def default_model_fn(self, model_dir, context=None):
        return 3
    def default_predict_fn(self, data, model, context=None):
        return data * model

class HandlerService(DefaultHandlerService):
    def __init__(self):
        super().__init__(transformer=Transformer(default_inference_handler=Mine()))
"""
BASE = [
    File(name="base-all-but-output", oracle="base", model="empty", code="""
        import json, numpy as np
        def model_fn(model_dir): return 2
        def input_fn(body, content_type): return np.array(json.loads(body))
        def predict_fn(data, model): return data * model
        """, questions=[ask(ROWS), ask(ROWS, CSV), ask(ROWS, NPY), ask(ROWS, "a/b", ours=406)]),
    File(name="base-decoders-of-the-toolkit", oracle="base", model="empty", code="""
        from sagemaker_inference import decoder, encoder
        def model_fn(model_dir): return 2
        def input_fn(body, content_type): return decoder.decode(body, content_type)
        def predict_fn(data, model): return data * model
        def output_fn(prediction, accept): return encoder.encode(prediction, accept)
        """, questions=[ask(ROWS), ask_csv("1,2\n3,4\n", CSV), ask_npy(ROWS, NPY),
                        ask_bytes(b"x", "a/b", ours=415)]),
    File(name="service-class", oracle="service", model="empty", program="handler_service.py",
         code=SERVICE, questions=[ask(ROWS), ask(ROWS, CSV), ask_csv("1,2\n3,4\n"),
                                  ask_npy(ROWS, NPY), ask("text", ours=500)]),
    File(name="service-function", oracle="service", model="empty", program="handler_service.py",
         code=SERVICE + """
_service = HandlerService()
_ready = []
def handle(data, context):
    if not _ready:
        _service.initialize(context)
        _ready.append(True)
    return None if data is None else _service.handle(data, context)
""", questions=[ask(ROWS), ask(ROWS, NPY)]),
    File(name="service-sets-the-answer", oracle="service", model="empty",
         program="handler_service.py", code="""
        class HandlerService:
            def initialize(self, context):
                self.place = context.system_properties["model_dir"]
            def handle(self, data, context):
                kind = context.request_processor[0].get_request_properties()["Content-Type"]
                if kind != "application/json":
                    context.set_response_status(415, "send JSON")
                    return ["no"]
                context.set_response_content_type(0, "text/csv")
                return [data[0]["body"].decode().strip("[]")]
        """, questions=[ask([1, 2]), ask_bytes(b"x", "a/b", ours=415)]),
]  # fmt: skip

FILES = [*HUGGING_FACE, *PYTORCH, *BASE]
