"""The command line itself."""

import pytest

from amphora import cli


def test_the_help_of_train_leads_to_the_hyperparameters(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "hyperparameters.json" in shown and "code/train.py --help" in shown
