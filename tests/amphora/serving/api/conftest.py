"""Makes the recipe importable: these tests answer requests by its models."""

import sys

from tests.support.paths import CODE

sys.path.insert(0, str(CODE))
