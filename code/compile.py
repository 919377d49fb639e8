"""Compile a model's programs ahead: what `amphora compile` runs.

    python compile.py MODEL_FOLDER

They are kept in the folder compiled-programs of the model's, where the image's own handlers find
them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from recipe.errors import RecipeError
from recipe.inference import registry
from recipe.inference.static import kept


def main() -> int:
    """Compile the model in the folder that is named; 1, with the reason, if that cannot be."""
    model_dir = Path(sys.argv[1])
    try:
        kept.write(model_dir, os.environ, lambda: registry.load(str(model_dir), os.environ))
    except (RecipeError, ValueError) as error:
        print(f"amphora compile: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
