"""Names the replacement of the toolkit's handler services."""

raise ImportError(
    "handler_service.HuggingFaceHandlerService is not in this image. Write its methods as functions"
    " in inference.py: load as model_fn(model_dir), preprocess as input_fn(body, content_type),"
    " predict as predict_fn(data, model), postprocess as output_fn(prediction, accept)."
)
