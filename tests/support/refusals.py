"""What a refusal must name."""

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def refused(error: type[Exception] | tuple[type[Exception], ...], *words: str) -> Iterator[None]:
    """See that an error is raised whose text has all the words."""
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
