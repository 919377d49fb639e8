"""What training (`code/train.py`) and serving (`code/inference.py`) share.

Modules by floor; a module imports lower floors only, and none imports the package `amphora`:

- 0 `errors`, `console`, `names` (of columns), `metrics` (the metric line and its regexes),
  `encoding` (texts to token ids), `cpu` (what trains faster there), `stopwatch`, `figures` (of a
  report), `losses`, `rate` (of matrix products), `interruptions` (when a training saves and
  stops), `plan` (which samples make a step), `reduction` (sums between processes), `xla`
  (torch-xla), `foreign_names` (what other trainers call hyperparameters), `value_ranges` (of
  hyperparameters), `places` (SM_* and /opt/ml), `accept` (what a client takes)
- 1 `arguments` (hyperparameters), `part` (rows of a file), `device`,
  `saving` (results, whole or not at all), `sums` (by which damage shows), `libraries` (how much
  they say), `wire` (request and answer), `serialization` (predictions of any kind to bodies),
  `huggingface_defaults`
- 2 `pytorch_defaults`,
  `layout` (channels to files), `delimited`, `json_rows`, `fasttext`, `workbooks` (a file of
  that kind to rows), `columns` (which are read), `causal_chat` (conversations to tokens),
  `labels`, `distribution`, `lora`, `encoder` (a saved model over batches of texts), `families`
  (models that take packed batches), `batches` (token ids to packed or padded batches),
  `checkpoints`, `xla_trainer` (HF Trainer, on torch-xla too), `trial` (a run for its graphs)
- 3 `formats` (a file to rows), `resuming` (a Trainer that can be killed), `causal_batches`
  (documents to learn, to batches), `modeling` (which model, and loading it); what answers with a
  saved model: `classifier`, `tagger`, `embedder`, `generator`
- 4 `tasks` (which of those), `data` (channels to labelled splits), `tokens` (splits to token
  ids), `causal_model` (decoders that take packed documents), `causal_samples` (how a model goes
  on), `evaluation`, `card`, `progress`
- 5 `causal_data` (channels to documents to learn), `objective` (what an engine trains for),
  `tracking` (TensorBoard, MLflow), `causal_tokens` (documents to token ids)
- 6 `engine` (the Trainer on our batches)
- 7 `report` (on a run)
- 8 `goals` (what a run trains for, by its task)
- 9 `training` (one run), `inspection` (what can be said before it)
"""
