"""How much the libraries underneath say."""

from __future__ import annotations

from transformers import logging

from recipe.console import has_terminal, is_first_process


def quieten() -> None:
    """Only errors from transformers, and its progress bars only where somebody watches them.

    What its warnings tell of a new head, `modeling.load` says in one line.
    """
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if not (has_terminal() and is_first_process()):
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
