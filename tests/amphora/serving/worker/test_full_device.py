"""A device whose memory a call does not fit into: 507, and the worker goes on with the others."""

import weakref
from pathlib import Path
from typing import Any

import pytest

from amphora.serving.protocol.media_types import Fault
from amphora.serving.worker.context import Context
from amphora.serving.worker.runner import Item, ModelRunner
from tests.support.worker_front import load_runner, write_code

# torch's exception is known by its name: this package knows no torch.
CODE_OF_USER = """
import weakref
made = []
class OutOfMemoryError(RuntimeError): pass
class Tensor: pass
def model_fn(model_dir): return "a model"
def input_fn(body: str, content_type): return body
def predict_fn(data, model):
    taken = Tensor()
    made.append(weakref.ref(taken))
    if "huge" in data or sum(1 for each in made if each() is not None) > 1:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return data
def predict_batch_fn(inputs, model):
    too_many = "huge " * (len(inputs) > 1)
    return [predict_fn(too_many + each, model) for each in inputs]
def output_fn(prediction, accept): return prediction
"""


def made(tmp_path: Path, code: str = CODE_OF_USER) -> tuple[ModelRunner, Any]:
    loaded = load_runner(write_code(tmp_path, {"code/inference.py": code}))

    def item(text: str) -> Item:
        return Item(
            "id", text.encode(), "text/plain", "text/plain", Context("id", {}, loaded.settings)
        )

    return loaded, item


TORCH = 'OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")'


@pytest.mark.parametrize(
    "error",
    [
        TORCH,
        'RuntimeError("CUDA error: out of memory\\nCompile with `TORCH_USE_CUDA_DSA`")',
        'RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")',
    ],
)
def test_a_request_that_does_not_fit_is_507_and_the_next_one_is_answered(
    error: str, tmp_path: Path
) -> None:
    loaded, item = made(tmp_path, CODE_OF_USER.replace(TORCH, error))
    with pytest.raises(Fault, match=r"out of memory|ALLOC_FAILED") as caught:
        loaded.answer(item("huge"))
    assert (caught.value.status, caught.value.code) == (507, "out_of_memory")
    # Though the error is kept, what the call had taken is free.
    assert loaded.answer(item("small"))[0] == b"small"
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("yields", [False, True])
def test_requests_that_do_not_fit_together_are_answered_alone(yields: bool, tmp_path: Path) -> None:
    listed = "return [predict_fn(too_many + each, model) for each in inputs]"
    generated = "for each in inputs: yield predict_fn(too_many + each, model)"
    loaded, item = made(tmp_path, CODE_OF_USER.replace(listed, generated if yields else listed))
    items = [item("one"), item("huge"), item("two")]
    for entry in items:
        loaded.read_input(entry)
    first, second, third = loaded.predict_batch(items)
    assert (first, third) == ("one", "two")
    assert isinstance(second, Fault) and second.status == 507


def test_another_error_keeps_its_frames_for_the_log(tmp_path: Path) -> None:
    loaded, item = made(tmp_path, CODE_OF_USER.replace("OutOfMemoryError(", "ValueError("))
    with pytest.raises(Fault) as caught:
        loaded.answer(item("huge"))
    assert caught.value.status == 500
    frame = caught.value.__cause__.__traceback__  # type: ignore[union-attr]
    assert frame is not None
    while frame.tb_next is not None:
        frame = frame.tb_next
    assert isinstance(weakref.ref(frame.tb_frame.f_locals["taken"]), weakref.ref)
