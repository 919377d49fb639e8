"""The handlers of Hugging Face's image, for files that do not define them: `model_fn` makes a
pipeline for HF_TASK, or else for the task of the model's head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def make_pipeline(model_dir: str, environ: Mapping[str, str]) -> Any:
    """Load transformers' pipeline for the model in `model_dir`, or of HF_MODEL_ID, on this device.

    It computes in float32, as in Hugging Face's image, unless AMPHORA_DTYPE names another
    precision: user code calls `.numpy()`, which does not support bfloat16. It is a `TaskPipeline`
    for tasks whose pipelines transformers 5 dropped, and on devices that compile a program for each
    shape.

    Raise ModelError if there is no model, or its files are damaged or incomplete, and ValueError if
    HF_TASK is not a known task.
    """
    from transformers.pipelines import PIPELINE_REGISTRY

    from recipe.backend import loading, precision, programs
    from recipe.backend.pipelines import library
    from recipe.compat import quieten
    from recipe.inference import registry
    from recipe.models.sources.origin import Origin
    from recipe.runtime import device
    from recipe.storage import checksums
    from recipe.task_table import SERVED

    quieten()
    device.avoid_wrong_kernels()
    origin = Origin.find(model_dir, environ)
    name = environ.get("HF_TASK") or registry.task_of(origin)
    try:
        task, targets, _ = PIPELINE_REGISTRY.check_task(library.registered_name(name))
    except KeyError:
        return TaskPipeline(name, registry.load(model_dir, environ))
    if environ.get("HF_TASK"):
        registry.check_head(origin, task)
    kind, _, _ = precision.chosen(environ)
    if kind in programs.DEVICES and task in SERVED:
        # transformers' pipelines would compile a program for the length of each text.
        return TaskPipeline(task, registry.load(model_dir, {**environ, "HF_TASK": task}))
    precise = {**environ, "AMPHORA_DTYPE": environ.get("AMPHORA_DTYPE") or "float32"}
    with checksums.verified(origin.location):
        if task not in SERVED:
            return library.load_pipeline(origin, task, precise)
        return library.wrap_pipeline(task, loading.load(origin, targets["pt"][0], precise))


class TaskPipeline:
    """A task of these handlers behind the interface of transformers' pipelines: it is called, and
    has the attributes `task` (its name), `model` and `tokenizer`."""

    def __init__(self, name: str, answerer: Any) -> None:
        self.task = name
        self._answerer = answerer
        loaded = getattr(answerer, "loaded", None)
        self.model = getattr(loaded, "model", None)
        self.tokenizer = getattr(loaded, "tokenizer", None)

    def __call__(self, inputs: Any = None, **parameters: Any) -> Any:
        """Return the answer for `{"inputs": inputs, "parameters": parameters}`, as lists and dicts.

        `question` and `context` may be given instead of `inputs`. Raises BadRequest (400) for
        inputs or parameters that the task does not accept.
        """
        from recipe.backend.requests.payloads import Request, is_conversation

        if inputs is None:
            names = ("question", "context")
            inputs = {name: parameters.pop(name) for name in names if name in parameters}
        if isinstance(inputs, tuple):
            inputs = list(inputs)
        is_list = isinstance(inputs, list) and not is_conversation(inputs)
        values = inputs if is_list else [inputs]
        request = Request(inputs=values, parameters=parameters, single=not is_list)
        (answer,) = self._answerer.predict([self._answerer.prepare(request)])
        if isinstance(answer, Iterator):
            return answer
        entries = [answer] if isinstance(answer, Exception) else answer["entries"]
        for entry in entries:
            if isinstance(entry, Exception):
                raise entry
        return entries[0] if answer["single"] else entries
