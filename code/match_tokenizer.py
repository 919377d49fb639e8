"""Write a model's tokenizer to a folder if transformers would load other ids than tokenizer.json's.

    python code/match_tokenizer.py path/to/model path/to/new/folder

The new folder, which vLLM reads in place of the model's, has no config.json, whose type of model
may decide the class of a tokenizer. Environment variables are those of a server.
"""

from __future__ import annotations

import os
import sys

from recipe.compat import quieten
from recipe.errors import RecipeError
from recipe.models.sources.origin import Origin
from recipe.models.sources.tokenizers import log_replacement, replacement_of


def main(argv: list[str]) -> None:
    """Write and log the tokenizer, unless it is loaded as usual."""
    model, folder = argv
    quieten()
    trust = os.environ.get("HF_TRUST_REMOTE_CODE", "").lower() in ("1", "true")
    tokenizer = Origin(model, {"trust_remote_code": True} if trust else {}).tokenizer()
    if replacement_of(tokenizer):
        tokenizer.save_pretrained(folder)
        log_replacement(tokenizer)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RecipeError as error:
        sys.exit(str(error))
