"""What training (`code/train.py`) and serving (`code/inference.py`) share.

Modules by floor, a module imports only lower floors:

- 0 `errors`, `console`, `names` (of columns), `metrics` (the metric line and its regexes),
  `encoding` (texts to token ids), `libraries` (their logging), `saving`
- 1 `arguments` (hyperparameters), `places` (SM_* and /opt/ml), `formats` (a file to a table),
  `wire` (request and answer), `classifier` (a saved model that answers)
- 2 `layout` (channels to files), `columns` (text and label), `labels`, `device`
- 3 `data` (channels to labelled splits), `modeling` (which model, and loading it)
- 4 `tokens` (splits to token ids), `batches` (token ids to padded batches), `evaluation`, `card`,
  `progress`
- 5 `training`
"""
